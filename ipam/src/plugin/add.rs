//! ADD: the order that a configuration and a request make, and its result.

use super::supply::{Fault, Supply};
use super::to_error;
use crate::config::{Config, Source, requested};
use crate::lease::Holder;
use crate::leases::{AddressRequest, Leases, Order};
use crate::range::{IpAddrWithLength, Range};
use crate::space::AddressSpace;
use cni_wire::{CniResult, Code, Error, IpConfig, Request, Route, text::list};
use ipnetwork::IpNetwork;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

/// What a node's policy says of an order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules {
    pub(super) request_excluded: bool,
    pub(super) cooldown: Duration,
}

/// Leases what the configuration asks for and puts the result together. Addresses of the host that
/// were passed over go into `of_host`.
pub(super) fn add(
    request: &Request,
    config: &Config,
    leases: &Leases,
    supply: &Supply<'_>,
    holder: &Holder,
    rules: Rules,
    of_host: &mut BTreeSet<IpAddr>,
) -> Result<CniResult, Error> {
    let requested = requested(request, config.profile)?;
    let asked = assign(&requested, config, rules.request_excluded)?;
    let order = order(config, holder, &asked, rules.cooldown);
    let taken = supply.lease(&order, leases, of_host).map_err(|fault| {
        let refused = match fault {
            Fault::Leases(refused) => refused,
            Fault::Supplier(error) => {
                return error.context(format_args!("lease the addresses of {holder}"));
            }
        };
        let range = refused.request.and_then(|number| config.ranges.get(number));
        let attempt = match range {
            Some(range) => format!("lease an address of {} for {holder}", range.subnet()),
            None => format!("lease the addresses of {holder}"),
        };
        to_error(&refused.error, attempt)
    })?;
    // A record is read only with a prefix length that fits its address.
    let taken = taken.iter();
    let taken = taken.filter_map(|lease| IpNetwork::new(lease.address, lease.prefix).ok());
    Ok(result(config, taken))
}

/// What ADD answers: leased addresses, and what goes with them.
pub(super) fn result(config: &Config, leased: impl Iterator<Item = IpNetwork>) -> CniResult {
    let leased = leased.enumerate().map(|(number, address)| IpConfig {
        gateway: config.gateway_of(number, address.ip()),
        address,
        interface: None,
    });
    CniResult {
        ips: leased.chain(config.fixed.iter().cloned()).collect(),
        routes: config.routes.clone(),
        dns: config.dns.clone(),
        ..CniResult::default()
    }
}

impl Config {
    /// What ADD answers with one address of each range, for each interface that it can have. None
    /// where a range gives no address.
    ///
    /// # Errors
    /// Code 7: the ranges of all rails are too many.
    pub fn examples(&self) -> Result<Vec<CniResult>, Error> {
        let config = self.for_all_rails()?;
        let ranges = config.ranges.iter().enumerate();
        let address = |(number, range): (usize, &Range)| {
            let is_gateway =
                |address: &IpAddr| config.gateway_of(number, *address) == Some(*address);
            let lowest = range.example().filter(|address| !is_gateway(address));
            // Profile compatible may have no other one.
            let example = lowest.or(range.lowest().and(Some(range.window().1)))?;
            IpNetwork::new(example, range.prefix()).ok()
        };
        let Some(addresses) = ranges.map(address).collect::<Option<Vec<IpNetwork>>>() else {
            return Ok(Vec::new());
        };
        let all = result(&config, addresses.into_iter());
        Ok(match self.rails() {
            None => vec![all],
            Some(rails) => by_interface(&config, all, rails.len()),
        })
    }
}

/// The result of each interface: the addresses of its ranges, and the routes that it has a part in.
/// `ipam.addresses` are the first interface's.
pub(super) fn by_interface(config: &Config, all: CniResult, interfaces: usize) -> Vec<CniResult> {
    let place = |number: usize| config.places.get(number).map_or(0, |place| place.interface);
    let of = |interface: usize| {
        let ips = all.ips.iter().enumerate();
        let ips: Vec<IpConfig> = ips
            .filter(|(number, _)| place(*number) == interface)
            .map(|(_, ip)| ip.clone())
            .collect();
        CniResult {
            routes: routes_of(&ips, &all),
            ips,
            dns: all.dns.clone(),
            ..CniResult::default()
        }
    };
    (0..interfaces).map(of).collect()
}

/// A route whose next hop is in the network of an interface is that interface's; any other is
/// everyone's that has an address of its family.
fn routes_of(ips: &[IpConfig], all: &CniResult) -> Vec<Route> {
    let reached = |ips: &[IpConfig], gw: IpAddr| ips.iter().any(|ip| ip.address.contains(gw));
    let is_own = |route: &&Route| match route.gw {
        Some(gw) if reached(&all.ips, gw) => reached(ips, gw),
        _ => {
            let v4 = route.dst.is_ipv4();
            ips.iter().any(|ip| ip.address.is_ipv4() == v4)
        }
    };
    all.routes.iter().filter(is_own).cloned().collect()
}

/// One address of each range of the configuration; `asked` are those that were asked for, by
/// the number of their range.
pub(super) fn order(
    config: &Config,
    holder: &Holder,
    asked: &[Option<IpAddr>],
    cooldown: Duration,
) -> Order {
    let ranges = config.ranges.iter().enumerate();
    Order {
        holder: holder.clone(),
        profile: config.profile,
        space: AddressSpace::new(&config.store, config.network_name.as_deref()),
        overlapping: config.overlapping,
        requests: ranges
            .map(|(number, range)| AddressRequest {
                range: range.clone(),
                same_host_number_as: config.like(number),
                requested: asked.get(number).copied().flatten(),
            })
            .collect(),
        cooldown,
    }
}

const ONE_OF_EACH: &str = "one address may be asked for from each range";

/// Which range each requested address is to come from.
pub(super) fn assign(
    requested: &[(IpAddrWithLength, Source)],
    config: &Config,
    request_excluded: bool,
) -> Result<Vec<Option<IpAddr>>, Error> {
    let mut asked = vec![None; config.ranges.len()];
    for ((address, length), source) in requested {
        let refuse = |why: String| {
            let code = match source {
                Source::CniArgs => Code::InvalidEnvironment,
                Source::Runtime | Source::Annotation => Code::InvalidConfig,
            };
            Error::new(code, format!("{}: {address} {why}", source.as_str()))
        };
        let around = |range: &Range| range.subnet().contains(*address);
        let taken = config.ranges.iter().zip(&asked);
        let taken: Vec<(IpNetwork, IpAddr)> = taken
            .filter(|(range, _)| around(range))
            .filter_map(|(range, asked)| Some((range.subnet(), (*asked)?)))
            .collect();
        let mut fits = config
            .ranges
            .iter()
            .zip(&mut asked)
            .enumerate()
            .filter(|(_, (range, asked))| asked.is_none() && around(range));
        let Some((number, (range, slot))) = fits.next() else {
            if let Some((subnet, other)) = taken.last() {
                return Err(refuse(format!(
                    "lies in range {subnet}, from which {other} is asked for already"
                ))
                .with_details(ONE_OF_EACH));
            }
            let ranges = list(config.ranges.iter().map(Range::subnet));
            return Err(
                refuse(format!("lies in none of the ranges {ranges}")).with_details(ONE_OF_EACH)
            );
        };
        let subnet = range.subnet();
        if length.is_some_and(|length| length != range.prefix()) {
            let prefix = range.prefix();
            return Err(refuse(format!(
                "has another prefix length than the /{prefix} of its range {subnet}"
            )));
        }
        if !range.may_be_requested(*address) {
            let network = range.network_of(*address);
            return Err(refuse(format!("is the first or last address of {network}")));
        }
        if range.gateway_of(*address) == Some(*address) {
            let network = range.network_of(*address);
            return Err(refuse(format!("is the gateway of {network} (perNode)"))
                .with_details("ask for another address, or for none"));
        }
        if config.is_reserved(number, *address) {
            let why = "is a gateway or next hop of the network, or one of ipam.addresses";
            return Err(refuse(why.to_owned()));
        }
        if !request_excluded && !range.gives(*address) {
            return Err(
                refuse(format!("is excluded from {subnet}, or beyond its bounds")).with_details(
                    "ask for another; the node's policy may allow it by allow.requestExcluded",
                ),
            );
        }
        *slot = Some(*address);
    }
    Ok(asked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::AddressPosition;

    #[test]
    fn the_gateway_of_a_nodes_network_cannot_be_requested() {
        for kind in ["rdma-ipam", "whereabouts"] {
            let text = serde_json::json!({"cniVersion": "1.0.0", "name": "a", "ipam": {"type": kind,
                "range": "10.0.0.0/24", "exclude": ["10.0.0.10/32"],
                "perNode": {"prefix": 29, "gateway": "first"}}});
            let network = cni_wire::NetworkConfig::parse(text.to_string().as_bytes()).unwrap();
            let flat = cni_wire::Section::absent("");
            let config = Config::read(&network, &flat, &node::policy::Policy::default()).unwrap();
            let ask = |address: &str| {
                let requested = [((address.parse().unwrap(), None), Source::CniArgs)];
                assign(&requested, &config, true)
            };
            let refused = ask("10.0.0.9").unwrap_err();
            assert!(refused.msg.contains("is the gateway"), "{refused}");
            assert!(ask("10.0.0.10").is_ok(), "{kind}");
        }
    }

    #[test]
    fn each_interface_has_its_addresses_and_the_routes_that_it_reaches() {
        let route = |dst: &str, gw: Option<&str>| {
            Route::via(dst.parse().unwrap(), gw.map(|gw| gw.parse().unwrap()))
        };
        let text = serde_json::json!({"cniVersion": "1.0.0", "name": "a", "ipam": {"type": "rdma-ipam", "ranges": {
            "0": [{"range": "10.0.0.0/24"}, {"range": "fd00::/64"}], "1": {"range": "10.1.0.0/24"}}}});
        let network = cni_wire::NetworkConfig::parse(text.to_string().as_bytes()).unwrap();
        let flat = cni_wire::Section::absent("");
        let config = Config::read(&network, &flat, &node::policy::Policy::default()).unwrap();
        let config = config.for_rails(&[0, 1]).unwrap();
        assert_eq!(
            config.places[2],
            AddressPosition {
                interface: 1,
                nth: 0
            }
        );
        let ip = |address: &str| IpConfig {
            address: address.parse().unwrap(),
            gateway: None,
            interface: None,
        };
        let all = CniResult {
            ips: ["10.0.0.7/24", "fd00::7/64", "10.1.0.7/24", "192.0.2.9/32"]
                .map(ip)
                .to_vec(),
            routes: vec![
                route("10.0.0.0/8", None),
                route("10.9.0.0/16", Some("10.1.0.1")),
                route("10.8.0.0/16", Some("192.0.2.254")),
                route("fd00::/16", None),
            ],
            ..CniResult::default()
        };
        let shown: Vec<(Vec<String>, Vec<String>)> = by_interface(&config, all, 2)
            .iter()
            .map(|one| {
                let ips = one.ips.iter().map(|ip| ip.address.to_string());
                let routes = one.routes.iter().map(|route| route.dst.to_string());
                (ips.collect(), routes.collect())
            })
            .collect();
        let texts = |list: &[&str]| list.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        assert_eq!(
            shown,
            [
                (
                    // An address of `ipam.addresses` is the first's.
                    texts(&["10.0.0.7/24", "fd00::7/64", "192.0.2.9/32"]),
                    texts(&["10.0.0.0/8", "10.8.0.0/16", "fd00::/16"]),
                ),
                (
                    texts(&["10.1.0.7/24"]),
                    texts(&["10.0.0.0/8", "10.9.0.0/16", "10.8.0.0/16"]),
                ),
            ]
        );
    }
}
