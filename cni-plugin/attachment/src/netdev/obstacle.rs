//! What keeps a netdev from being moved: state of the host's that a change of namespaces destroys
//! and this program does not restore, or that would act in the pod.

use std::{fs, io::ErrorKind, path::Path};

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
    proc: &Path,
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
    // A kernel without packet sockets has no such file.
    let sockets = match fs::read_to_string(proc.join("net/packet")) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            return Err(netlink::Error::call("list packet sockets", e));
        }
        sockets => sockets.unwrap_or_default(),
    };
    if let Some(protocol) = packet_socket(&sockets, link.index) {
        add(
            format!(
                "a program of the host has a packet socket on {name} (protocol 0x{protocol:04x}), \
                 which a move would cut off"
            ),
            format!("ss -0p shows the program: end it, or take {name} out of its configuration"),
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

/// The protocol of a packet socket that is bound to a link, by the text of `/proc/net/packet`. Pure.
///
/// Sockets that receive LLDP only are no obstacle: systemd-networkd has one on each link that it
/// manages, and opens it again.
fn packet_socket(sockets: &str, index: u32) -> Option<u16> {
    const LLDP: u16 = 0x88cc;
    let mut bound = sockets.lines().filter_map(|line| {
        let mut fields = line.split_whitespace().skip(3);
        let protocol = u16::from_str_radix(fields.next()?, 16).ok()?;
        let of: u32 = fields.next()?.parse().ok()?;
        (of == index).then_some(protocol)
    });
    bound.find(|protocol| *protocol != LLDP)
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
    fn packet_sockets_of_other_links_and_for_lldp_are_no_obstacle() {
        let sockets = "\
sk               RefCnt Type Proto  Iface R Rmem   User   Inode
00000000391faf33 3      3    88f7   3     1 0      0      22996228
0000000004630554 3      3    0003   0     1 10880  0      22996229
00000000391faf34 3      2    88cc   4     1 0      998    22996230
";
        assert_eq!(packet_socket(sockets, 3), Some(0x88f7));
        assert_eq!(packet_socket(sockets, 4), None);
        assert_eq!(packet_socket(sockets, 5), None);
        let both = format!("{sockets}x 3 3 0003 4 1 0 0 1\n");
        assert_eq!(packet_socket(&both, 4), Some(3));
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
