use netlink_packet_route::{
    address::AddressAttribute,
    link::{InfoData, InfoIpVlan, InfoKind, InfoMacVlan, IpVlanMode, MacVlanMode},
};

use super::*;
use crate::{Result, address, link::Change, rdma, route, rule};

fn nic() -> Link {
    Link {
        index: 3,
        name: "ens1f0".into(),
        altnames: vec!["enp1s0".into()],
        hardware: 1,
        mac: vec![2, 0, 0, 0, 0, 3],
        mtu: 9000,
        carrier: true,
        bus_device: Some("0000:01:00.0".into()),
        bus: Some("pci".into()),
        ..Link::default()
    }
}

fn machine() -> (Kernel, Namespace, Namespace) {
    let kernel = Kernel::default();
    let (host, pod) = (kernel.namespace("host"), kernel.namespace("pod"));
    kernel.add_link("host", &nic());
    (kernel, host, pod)
}

/// A child on index 3 of the namespace with this number.
fn create(
    socket: &mut Socket,
    name: &str,
    index: u32,
    more: Vec<LinkAttribute>,
    (kind, data): (InfoKind, InfoData),
) -> Result<Link> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = vec![LinkAttribute::IfName(name.into()), LinkAttribute::Link(3)];
    message.attributes.extend(more);
    let info = vec![LinkInfo::Kind(kind), LinkInfo::Data(data)];
    message.attributes.push(LinkAttribute::LinkInfo(info));
    socket.request("create", NEWLINK, NLM_F_CREATE | NLM_F_EXCL, &message)?;
    Ok(link::get(socket, By::Index(index))?.unwrap())
}

fn macvlan() -> (InfoKind, InfoData) {
    let mode = InfoMacVlan::Mode(MacVlanMode::Bridge);
    (InfoKind::MacVlan, InfoData::MacVlan(vec![mode]))
}

#[test]
fn a_child_is_created_and_deleted() {
    let (kernel, host, pod) = machine();
    let mut inside = pod.socket(&host).unwrap();
    assert_eq!(link::known_number(&mut inside, &host).unwrap(), None);
    let number = link::namespace_number(&mut inside, &host).unwrap();
    let more = || {
        vec![
            LinkAttribute::LinkNetNsId(number),
            LinkAttribute::Mtu(1500),
            LinkAttribute::Address(vec![2, 0, 0, 0, 0, 9]),
        ]
    };
    let chosen = 1 << 20;
    let made = create(&mut inside, "net1", chosen, more(), macvlan()).unwrap();
    assert_eq!((made.index, made.hardware, made.mtu), (chosen, 1, 1500));
    assert_eq!(
        (made.kind.clone(), made.parent),
        (Some(InfoKind::MacVlan), Some(3))
    );
    for (name, index) in [("net1", 9), ("net2", chosen)] {
        let taken = create(&mut inside, name, index, more(), macvlan()).unwrap_err();
        assert!(taken.is(libc::EEXIST), "{name}");
    }
    link::delete(&mut inside, &made).unwrap();
    assert_eq!(link::list(&mut inside).unwrap().len(), 1, "loopback stays");
    let changes = kernel.changes();
    assert_eq!(
        changes[1],
        "pod: link add dev 1048576 name net1 link 3 linknetnsid 0 mtu 1500 \
         address 02:00:00:00:00:09 type macvlan mode bridge"
    );
    assert_eq!(changes.last().unwrap(), "pod: link delete dev 1048576");
}

#[test]
fn a_link_moves_there_and_back_with_its_index() {
    let (kernel, host, pod) = machine();
    let (mut outside, mut inside) = (host.socket(&host).unwrap(), pod.socket(&host).unwrap());
    let into_pod = Change {
        netns: Some(&pod),
        ..Change::name(b"net1")
    };
    link::change(&mut outside, "move", 3, &into_pod).unwrap();
    link::change(&mut inside, "up", 3, &Change::up()).unwrap();
    assert_eq!(kernel.link("pod", "net1").altnames, ["enp1s0"]);
    kernel.refuse("netns host", libc::EBUSY, "busy for a test");
    let home = Change {
        netns: Some(&host),
        ..Change::name(b"ens1f0")
    };
    let refused = link::change(&mut inside, "move net1", 3, &home).unwrap_err();
    assert!(
        refused.to_string().ends_with("(kernel: busy for a test)"),
        "{refused}"
    );
    kernel.refuse_nothing();
    link::change(&mut inside, "move", 3, &home).unwrap();
    assert_eq!(kernel.link("host", "ens1f0"), nic(), "down again");
    assert_eq!(
        kernel.changes(),
        [
            "host: link set dev 3 netns pod name net1",
            "pod: link set dev 3 up",
            "pod: link set dev 3 netns host name ens1f0",
            "pod: link set dev 3 netns host name ens1f0",
        ]
    );
}

#[test]
fn addresses_rules_and_names_are_kept() {
    let (kernel, host, _pod) = machine();
    let mut socket = host.socket(&host).unwrap();
    let mut own = AddressMessage::default();
    own.header.family = netlink_packet_route::AddressFamily::Inet;
    own.header.prefix_len = 24;
    own.header.index = 3;
    own.attributes
        .push(AddressAttribute::Local("10.0.0.5".parse().unwrap()));
    address::add(&mut socket, "add", &own).unwrap();
    assert!(
        address::add(&mut socket, "add", &own)
            .unwrap_err()
            .is(libc::EEXIST)
    );
    assert_eq!(address::list(&mut socket, 3).unwrap(), [own.clone()]);
    assert!(address::list(&mut socket, 1).unwrap().is_empty());
    address::delete(&mut socket, "delete", &own).unwrap();
    address::delete(&mut socket, "delete", &own).unwrap();
    assert!(address::list(&mut socket, 0).unwrap().is_empty());
    assert_eq!(kernel.changes()[0], "host: address add dev 3 10.0.0.5/24");

    let mut from = RuleMessage::default();
    from.header.family = netlink_packet_route::AddressFamily::Inet;
    from.header.src_len = 32;
    from.attributes = vec![
        netlink_packet_route::rule::RuleAttribute::Source("10.0.0.5".parse().unwrap()),
        netlink_packet_route::rule::RuleAttribute::Table(1000),
    ];
    rule::add(&mut socket, "add", &from).unwrap();
    assert_eq!(
        kernel.changes()[4],
        "host: rule add from 10.0.0.5/32 table 1000"
    );
    let v4 = rule::list(&mut socket, route::FAMILIES[0]).unwrap();
    assert_eq!(v4.iter().map(rule::table_of).collect::<Vec<_>>(), [1000]);
    assert!(
        rule::list(&mut socket, route::FAMILIES[1])
            .unwrap()
            .is_empty()
    );
    rule::delete(&mut socket, "delete", &from).unwrap();
    assert!(
        rule::list(&mut socket, route::FAMILIES[0])
            .unwrap()
            .is_empty()
    );

    let link = kernel.link("host", "enp1s0");
    link::remove_altname(&mut socket, &link, &"enp1s0".into()).unwrap();
    assert_eq!(link::get(&mut socket, By::Name(b"enp1s0")).unwrap(), None);
    link::add_altname(&mut socket, &kernel.link("host", "ens1f0"), &"fast".into()).unwrap();
    assert_eq!(kernel.link("host", "fast").index, 3);
    assert_eq!(
        kernel.changes().last().unwrap(),
        "host: altname add dev 3 fast"
    );
}

#[test]
fn a_refused_dump_has_the_text() {
    let (kernel, host, _pod) = machine();
    let mut socket = host.socket(&host).unwrap();
    kernel.refuse("route list", libc::EINVAL, "no such thing");
    let refused = route::list(&mut socket, route::FAMILIES[0], 3).unwrap_err();
    assert!(refused.is(libc::EINVAL));
    assert!(
        refused.to_string().ends_with("(kernel: no such thing)"),
        "{refused}"
    );
}

#[test]
fn an_rdma_device_moves() {
    let (kernel, host, pod) = machine();
    kernel.add_rdma("host", 7, "mlx5_0", ("uverbs0", 0xe700));
    let mut outside = rdma::socket(&host, &host).unwrap().unwrap();
    let device = rdma::list(&mut outside).unwrap().remove(0);
    let node = rdma::verbs_node(&mut outside, &device).unwrap().unwrap();
    assert_eq!(node, "uverbs0");
    rdma::give(&mut outside, &device, &pod).unwrap();
    assert!(rdma::list(&mut outside).unwrap().is_empty());
    let mut inside = rdma::socket(&pod, &host).unwrap().unwrap();
    rdma::rename(&mut inside, &device, "rdma0").unwrap();
    assert_eq!(rdma::list(&mut inside).unwrap()[0].name, "rdma0");
    assert_eq!(
        kernel.changes(),
        [
            "host: rdma set index 7 netns pod",
            "pod: rdma set index 7 name rdma0"
        ]
    );
}

#[test]
fn kinds_of_children_are_said_as_ip_says_them() {
    let (kernel, host, _pod) = machine();
    let mut socket = host.socket(&host).unwrap();
    let mode = InfoIpVlan::Mode(IpVlanMode::L3S);
    let ipvlan = (InfoKind::IpVlan, InfoData::IpVlan(vec![mode]));
    let made = create(&mut socket, "net2", 1 << 20, Vec::new(), ipvlan).unwrap();
    assert_eq!((made.mac, made.mtu), (nic().mac, 9000));
    assert_eq!(
        kernel.changes(),
        ["host: link add dev 1048576 name net2 link 3 type ipvlan mode l3s"]
    );
}
