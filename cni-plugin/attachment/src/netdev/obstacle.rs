//! What keeps a netdev from being moved: state of the host's that a change of namespaces destroys
//! and this program does not restore, or that would act in the pod.

use cni_wire::Code;
use hca::MacAddress;
use netlink::{Socket, bpf, link::Link, neighbour, qdisc};

use super::{display, replay, snapshot::Snapshot};
use crate::error::Error;

/// Where the pod's addresses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addresses {
    OfIpam,
    /// The netdev's own of the host.
    OfHost,
}

/// What keeps a netdev of the host from being moved. Reads alone; the thread is in the host's
/// namespace.
pub fn obstacles(
    socket: &mut Socket,
    link: &Link,
    snapshot: &Snapshot,
    addresses: Addresses,
) -> netlink::Result<Vec<Error>> {
    let name = &link.name;
    let mut found = Vec::new();
    let mut add = |what: String, remedy: String| found.push(obstacle(what, remedy));
    let qdiscs = qdisc::get(socket, link.index)?;
    if let Some(kind) = qdiscs.root {
        add(
            format!("{name} has the queueing discipline {kind}, which a move would remove"),
            format!("remove it: tc qdisc del dev {name} root"),
        );
    }
    if let Some(kind) = qdiscs.ingress {
        add(
            format!("{name} has {kind} with the host's filters, which a move would remove"),
            format!("remove it: tc qdisc del dev {name} {kind}"),
        );
    }
    for (mode, id) in &link.xdp {
        add(
            format!(
                "{name} has the XDP program {id} ({} mode), which would act in the pod",
                mode.name
            ),
            format!("end what attached it, or detach it: ip link set dev {name} xdp off"),
        );
    }
    for program in bpf::tcx(link.index)? {
        add(
            format!("{name} has the {program}, which would act in the pod"),
            format!(
                "end what attached it (bpftool net show dev {name}), or take {name} out of its \
                 configuration"
            ),
        );
    }
    let routes = snapshot.state.config.routes.iter();
    for route in routes.filter(|route| replay::is_multipath(route)) {
        let route = display::route(route);
        add(
            format!("{name} is in the multipath route {route}, which a move would change"),
            "remove the route, or give it one next hop: ip route replace".to_owned(),
        );
    }
    // IPoIB has its own.
    if !link.is_infiniband()
        && let Some(address) = neighbour::list_unicast(socket, link.index)?.first()
    {
        let address = MacAddress::new(address.as_slice());
        add(
            format!(
                "{name} receives for the address {address}, too: a child of it is in another network \
                 namespace, or somebody added the address, which a move would remove"
            ),
            format!(
                "end the pod that has the child; or remove the address: bridge fdb del {address} \
                 dev {name} self"
            ),
        );
    }
    found.extend(leased(snapshot, addresses));
    Ok(found)
}

fn obstacle(what: String, remedy: impl AsRef<str>) -> Error {
    Error::new(Code::Policy, what).with_details(remedy)
}

/// A pod would be without an address although the netdev has some. Pure.
fn leased(snapshot: &Snapshot, addresses: Addresses) -> Option<Error> {
    let leased = snapshot.leased_addresses();
    let lasting = snapshot.state.config.addresses.len() - leased.len();
    let goes = addresses == Addresses::OfIpam || snapshot.static_addresses;
    if goes || leased.is_empty() || lasting > 0 {
        return None;
    }
    let (name, leased) = (&snapshot.name, leased.join(", "));
    Some(obstacle(
        format!(
            "all addresses of {name} have a lifetime ({leased}), and nothing renews them in the pod"
        ),
        "give the network an ipam, or set \"fabricAddresses\": \"static\" in the node's policy if \
         the fabric keeps these addresses for the node as long as it lives",
    ))
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::address::{AddressAttribute, AddressMessage, CacheInfo};

    use super::*;

    fn address(text: &str, valid: u32) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.family = netlink_packet_route::AddressFamily::Inet;
        message.header.prefix_len = 24;
        let mut lifetime = CacheInfo::default();
        (lifetime.ifa_preferred, lifetime.ifa_valid) = (valid, valid);
        message.attributes = vec![
            AddressAttribute::Local(text.parse().unwrap()),
            AddressAttribute::CacheInfo(lifetime),
        ];
        message
    }

    #[test]
    fn a_leased_address_alone_is_refused_without_an_ipam() {
        let mut snapshot = Snapshot {
            name: "ens1".into(),
            ..Snapshot::default()
        };
        let set = |snapshot: &mut Snapshot, addresses: &[AddressMessage]| {
            snapshot.state.config.addresses = addresses.to_vec();
        };
        set(&mut snapshot, &[address("10.0.0.1", 600)]);
        let found = leased(&snapshot, Addresses::OfHost).unwrap();
        assert!(
            found.msg.contains("ens1") && found.msg.contains("10.0.0.1/24"),
            "{found}"
        );
        assert_eq!(leased(&snapshot, Addresses::OfIpam), None);
        assert!(found.details.contains("fabricAddresses"), "{found}");
        snapshot.static_addresses = true;
        assert_eq!(leased(&snapshot, Addresses::OfHost), None);
        snapshot.static_addresses = false;
        let both = [address("10.0.0.1", 600), address("10.0.1.1", u32::MAX)];
        set(&mut snapshot, &both);
        assert_eq!(leased(&snapshot, Addresses::OfHost), None);
        set(&mut snapshot, &[]);
        assert_eq!(
            leased(&snapshot, Addresses::OfHost),
            None,
            "it has none to lose"
        );
    }
}
