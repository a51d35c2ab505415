//! IP settings where several rails are in one namespace (A).
//!
//! Linux answers ARP for any of its addresses on any netdev and drops packets whose way back is
//! another netdev. With one network card that is a convenience; with eight rails it mixes them up.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnetwork::IpNetwork;
use netlink::Socket;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::rule::RuleAttribute;

use super::check::{Findings, checks, need};
use super::context::{Context, ELSEWHERE};
use crate::verdict::{FOR_THE_CONTAINER, Finding, words};
use hca::uplink::Uplinks;
use rdma_device_plugin::files;

/// What is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    /// The container's checks are made.
    pub in_pod: bool,
    /// Netdevs of RDMA devices that have IPv4 here.
    pub rails: Vec<Rail>,
    /// Addresses are not known: this process is in another network namespace.
    pub elsewhere: bool,
    /// Settings for all netdevs.
    pub all: Settings,
    /// Netdevs that the namespace is left through.
    pub uplinks: Vec<String>,
    /// Sources that have a routing rule; `None` if the kernel cannot be asked.
    pub rules: Option<Vec<IpAddr>>,
}

/// A rail.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Rail {
    /// Its netdev.
    pub netdev: String,
    /// Its IPv4 addresses with their prefix lengths.
    pub addresses: Vec<IpNetwork>,
    /// Its settings.
    pub settings: Settings,
}

impl Rail {
    /// Subnets that it is connected to, by their first address and prefix length.
    fn subnets(&self) -> impl Iterator<Item = (IpAddr, u8)> {
        let subnet = |address: &IpNetwork| (address.network(), address.prefix());
        self.addresses
            .iter()
            .map(subnet)
            .filter(|(_, prefix)| *prefix < 32)
    }
}

/// Settings of IPv4, each as its file says; `None` if it cannot be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Settings {
    /// `arp_ignore`.
    pub arp_ignore: Option<u8>,
    /// `arp_announce`.
    pub arp_announce: Option<u8>,
    /// `rp_filter`.
    pub rp_filter: Option<u8>,
}

checks! {
    "A01" "rails answer ARP for their own address only" a01_ignore;
    "A02" "rails announce their own address" a02_announce;
    "A03" "packets of rails are not dropped for their way back" a03_filter;
    "A05" "each rail's traffic leaves by that rail" a05_rules;
    "A06" "the default route is not a rail's" a06_default;
}

/// Reads the namespace that is checked.
pub(super) fn read(context: &Context) -> Facts {
    let inventory = &context.snapshot.inventory;
    // A NIC for storage is on no rail, and what holds for rails is no concern of it.
    let nics = &context.snapshot.machine.nics;
    let off_rail = |netdev: &str| {
        let mut off = nics.iter().filter(|nic| nic.rail.is_none());
        off.any(|nic| nic.netdevs.iter().any(|name| name == netdev))
    };
    let devices = inventory.rdma_devices.iter();
    let devices = devices.filter(|device| context.offered(&device.name));
    let netdevs = devices.flat_map(hca::RdmaDevice::netdevs);
    let netdevs: BTreeSet<&str> = netdevs
        .filter(|name| inventory.netdev(name).is_some() && !off_rail(name))
        .collect();
    let rails = netdevs.into_iter().map(|netdev| rail(context, netdev));
    Facts {
        in_pod: context.settings.in_pod,
        rails: rails.filter(|rail| !rail.addresses.is_empty()).collect(),
        elsewhere: context.addresses.is_none(),
        all: settings(context, "all"),
        uplinks: match context.uplinks() {
            Uplinks::Known(uplinks) => uplinks.into_keys().collect(),
            Uplinks::Unknown(_) => Vec::new(),
        },
        rules: context.live.then(rules).flatten(),
    }
}

fn rail(context: &Context, netdev: &str) -> Rail {
    let addresses = context.addresses.iter().flatten();
    let of_rail = addresses.filter(|address| address.netdev == netdev && address.ip.is_ipv4());
    Rail {
        netdev: netdev.to_owned(),
        addresses: of_rail.map(|address| address.ip).collect(),
        settings: settings(context, netdev),
    }
}

fn settings(context: &Context, netdev: &str) -> Settings {
    let directory = context.host.proc.join("sys/net/ipv4/conf").join(netdev);
    let value = |name: &str| files::parsed(&directory.join(name));
    Settings {
        arp_ignore: value("arp_ignore"),
        arp_announce: value("arp_announce"),
        rp_filter: value("rp_filter"),
    }
}

/// Sources of the rules of this process's namespace; `None` if the kernel refuses.
fn rules() -> Option<Vec<IpAddr>> {
    let mut socket = Socket::open().ok()?;
    let list = netlink::rule::list(&mut socket, AddressFamily::Inet).ok()?;
    let source = |attribute: &RuleAttribute| match attribute {
        RuleAttribute::Source(source) => Some(*source),
        _ => None,
    };
    let rules = list.iter();
    Some(
        rules
            .filter_map(|rule| rule.attributes.iter().find_map(source))
            .collect(),
    )
}

fn rails(facts: &Facts) -> Result<&[Rail], Finding> {
    match facts.elsewhere {
        true => Err(Finding::unknown(ELSEWHERE)),
        false => Ok(&facts.rails),
    }
}

/// Rails that share a subnet with another one, or have none beyond their own address.
fn mixed(facts: &Facts) -> Result<Vec<&Rail>, Finding> {
    let rails = rails(facts)?;
    let shares = |rail: &&Rail| {
        let mut others = rails.iter().filter(|other| other.netdev != rail.netdev);
        others.any(|other| {
            other
                .subnets()
                .any(|subnet| rail.subnets().any(|own| own == subnet))
        })
    };
    let mixed: Vec<&Rail> = rails.iter().filter(shares).collect();
    need(!mixed.is_empty(), "no two rails are in one subnet")?;
    Ok(mixed)
}

/// The kernel takes the larger of the two (`Documentation/networking/ip-sysctl.rst`).
fn effective(all: Option<u8>, own: Option<u8>) -> Option<u8> {
    Some(all?.max(own?))
}

/// Judges a setting of each of some rails.
fn setting<'a>(
    facts: &Facts,
    rails: impl IntoIterator<Item = &'a Rail>,
    name: &str,
    of: fn(&Settings) -> Option<u8>,
    judge: impl Fn(u8, &Rail) -> Finding,
) -> Findings {
    let finding = |rail: &'a Rail| {
        let (all, own) = (of(&facts.all), of(&rail.settings));
        let shown = |value: Option<u8>| value.map_or("unreadable".to_owned(), |v| v.to_string());
        let finding = match effective(all, own) {
            Some(value) => judge(value, rail),
            None => Finding::unknown("these settings are those of another namespace"),
        };
        let finding = finding
            .on(&rail.netdev)
            .read(format!("{name} of all"), shown(all));
        finding.read(format!("{name} of {}", rail.netdev), shown(own))
    };
    Ok(rails.into_iter().map(finding).collect())
}

fn a01_ignore(facts: &Facts) -> Findings {
    let rails = mixed(facts)?;
    setting(
        facts,
        rails,
        "arp_ignore",
        |s| s.arp_ignore,
        |value, rail| match value {
            1 | 2 => Finding::pass("it does"),
            _ => Finding::warn(
                "it answers for the other rails' addresses as well: their traffic arrives here",
                format!("sysctl net.ipv4.conf.{}.arp_ignore=1", rail.netdev),
            ),
        },
    )
}

fn a02_announce(facts: &Facts) -> Findings {
    let rails = mixed(facts)?;
    setting(
        facts,
        rails,
        "arp_announce",
        |s| s.arp_announce,
        |value, rail| match value {
            2 => Finding::pass("it does"),
            _ => Finding::warn(
                "it may ask with another rail's address, which neighbours then learn",
                format!("sysctl net.ipv4.conf.{}.arp_announce=2", rail.netdev),
            ),
        },
    )
}

fn a03_filter(facts: &Facts) -> Findings {
    let why = "fewer than two rails with addresses";
    need(rails(facts)?.len() > 1, why)?;
    setting(
        facts,
        &facts.rails,
        "rp_filter",
        |s| s.rp_filter,
        |value, rail| match value {
            0 | 2 => Finding::pass("loose or off"),
            _ => Finding::warn(
                "strict: packets whose way back is another rail are dropped",
                format!(
                    "sysctl net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.{}.rp_filter=2; the larger of \
                 the two counts",
                    rail.netdev
                ),
            ),
        },
    )
}

fn a05_rules(facts: &Facts) -> Findings {
    let rails = mixed(facts)?;
    let Some(rules) = &facts.rules else {
        let why = "routing rules can only be asked of the running kernel";
        return Err(Finding::unknown(why));
    };
    let judge = |rail: &Rail| {
        let addresses = rail.addresses.iter().map(IpNetwork::ip);
        let without = addresses
            .filter(|ip| !rules.contains(ip))
            .map(|ip| ip.to_string());
        let without: Vec<String> = without.collect();
        let finding = match without.is_empty() {
            true => Finding::pass("by a rule for its address"),
            false => Finding::warn(
                format!(
                    "no rule for {}: its traffic leaves by whichever rail comes first",
                    without.join(", ")
                ),
                "ip rule add from ADDRESS table N, with the rail's subnet in table N",
            ),
        };
        finding.on(&rail.netdev)
    };
    Ok(rails.into_iter().map(judge).collect())
}

fn a06_default(facts: &Facts) -> Findings {
    need(facts.in_pod, FOR_THE_CONTAINER)?;
    need(!rails(facts)?.is_empty(), "no rail with an address")?;
    let is_rail = |uplink: &&String| facts.rails.iter().any(|rail| rail.netdev == **uplink);
    let wrong: Vec<&str> = facts
        .uplinks
        .iter()
        .filter(is_rail)
        .map(String::as_str)
        .collect();
    let finding = match wrong.is_empty() {
        true => Finding::pass("it is not"),
        false => Finding::fail(
            format!(
                "{} carries it: the pod loses the cluster's network and DNS",
                wrong.join(", ")
            ),
            "take the gateway out of that network's configuration",
        ),
    };
    Ok(vec![
        finding.read("default routes", words(&facts.uplinks, " ")),
    ])
}

#[cfg(test)]
mod tests;
