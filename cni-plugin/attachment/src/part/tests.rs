//! Apply, undo and check of each kind, against the fake kernel: what it is asked for, and what a pod can
//! not change.

use std::{fs, os::unix::fs::symlink, path::Path, time::Duration};

use ::node::policy::Policy;
use cni_wire::{AttachmentId, Code, ContainerId, IfName};
use netlink::{
    Namespace, Socket,
    fake::Kernel,
    link::{self, Change, Link},
};

use super::*;
use crate::{
    error::Error,
    journal::{Key, Netns, Record, record},
    netdev::snapshot::Snapshot,
    node::{HostNetns, Node, Places},
};

/// An index that no netdev of the machine that runs the tests has.
const NIC: u32 = 700_001;
const CHILD: u32 = (1 << 20) + 7;
const ADDRESS: &str = "0000:3b:00.0";

/// A host with one NIC, and a pod.
struct Machine {
    kernel: Kernel,
    node: Node,
    pod: Namespace,
    inside: Socket,
    _root: tempfile::TempDir,
}

fn nic(hardware: u16) -> Link {
    Link {
        index: NIC,
        name: "ens1f0".into(),
        hardware,
        mac: vec![2, 0, 0, 0, 0, 3],
        permanent_mac: vec![2, 0, 0, 0, 0, 3],
        mtu: 9000,
        carrier: true,
        bus_device: Some(ADDRESS.into()),
        bus: Some("pci".into()),
        ..Link::default()
    }
}

impl Machine {
    fn new() -> Self {
        Machine::with(&nic(1))
    }

    fn with(nic: &Link) -> Self {
        let root = tempfile::tempdir().unwrap();
        let kernel = Kernel::default();
        let (host, pod) = (kernel.namespace("host"), kernel.namespace("pod"));
        kernel.add_link("host", nic);
        let places = Places {
            root: root.path().to_owned(),
            policy: root.path().join("policy.json"),
            node: None,
        };
        let policy = Policy {
            state_dir: root.path().join("state"),
            ..Policy::default()
        };
        let netns = HostNetns {
            socket: host.socket(&host).unwrap(),
            namespace: host,
        };
        Machine {
            inside: pod.socket(&netns.namespace).unwrap(),
            node: Node::with(&places, policy, None, "test", netns),
            kernel,
            pod,
            _root: root,
        }
    }

    fn apply(&mut self, child: &Child) -> Result<Link, Error> {
        child.apply(&mut self.node.netns, &self.pod, &mut self.inside)
    }

    fn undo(&mut self, child: &Child) -> Result<(), Error> {
        let record = record_of(Part::Child(Box::new(child.clone())));
        let pod = Some(&self.pod);
        child.undo(&mut self.node, &record, pod, Duration::ZERO)
    }

    /// The NIC below `/sys/class/net`, under the names that it has on its way.
    fn show_nic(&self, names: &[&str]) {
        for name in names {
            let directory = self.node.roots.sys.join("class/net").join(name);
            fs::create_dir_all(&directory).unwrap();
            symlink(
                Path::new("../../../devices/pci0000:3a").join(ADDRESS),
                directory.join("device"),
            )
            .unwrap();
        }
    }

    fn names(&mut self, of_pod: bool) -> Vec<String> {
        let socket = match of_pod {
            true => &mut self.inside,
            false => &mut self.node.netns.socket,
        };
        let links = link::list(socket).unwrap();
        links.iter().map(|link| link.name.to_string()).collect()
    }
}

fn record_of(part: Part) -> Record {
    Record {
        version: record::VERSION,
        network: "rail0".into(),
        container_id: "c1".into(),
        ifname: "net1".into(),
        pod: Some("ml/a".into()),
        created: 1,
        boot: "b".into(),
        netns: Netns {
            path: "/run/netns/pod".into(),
            device: 0,
            inode: 1,
        },
        parts: vec![part],
        ipam: None,
    }
}

fn child(link: ChildLink) -> Child {
    Child {
        interface: Interface {
            name: "net1".into(),
            mtu: Some(1500),
            mac: "02:00:00:00:00:09".parse().ok(),
            ..Interface::default()
        },
        link,
        parent: Parent {
            name: "ens1f0".into(),
            index: NIC,
        },
        index: CHILD,
        slots: Vec::new(),
        may_lack_carrier: false,
        warning: None,
    }
}

const MACVLAN: ChildLink = ChildLink::Macvlan {
    mode: MacvlanMode::Bridge,
    broadcast_queue: None,
};
const IPVLAN: ChildLink = ChildLink::Ipvlan {
    mode: IpvlanMode::L3s,
};
const IPOIB: ChildLink = ChildLink::Ipoib {
    pkey: 0x8001,
    mode: IpoibMode::Datagram,
    user_multicast: true,
};
const ALL: [ChildLink; 3] = [MACVLAN, IPVLAN, IPOIB];

#[test]
fn a_macvlan_is_made_in_the_pod_with_its_name_and_index() {
    let mut machine = Machine::new();
    let made = machine.apply(&child(MACVLAN)).unwrap();
    assert_eq!((made.index, made.mtu), (CHILD, 1500));
    assert_eq!(
        machine.kernel.changes().last().unwrap(),
        "pod: link add dev 1048583 name net1 link 700001 linknetnsid 0 mtu 1500 \
         address 02:00:00:00:00:09 type macvlan mode bridge"
    );
}

#[test]
fn an_ipvlan_has_its_parents_mac_address() {
    let mut machine = Machine::new();
    let mut ipvlan = child(IPVLAN);
    ipvlan.interface.mac = None;
    let made = machine.apply(&ipvlan).unwrap();
    assert_eq!(made.mac, nic(1).mac);
    assert_eq!(
        machine.kernel.changes().last().unwrap(),
        "pod: link add dev 1048583 name net1 link 700001 linknetnsid 0 mtu 1500 type ipvlan mode l3s"
    );
}

#[test]
fn an_ipoib_child_is_made_beside_its_parent_and_moved() {
    let mut machine = Machine::with(&nic(32));
    let mut ipoib = child(IPOIB);
    ipoib.interface.mac = None;
    let made = machine.apply(&ipoib).unwrap();
    assert_eq!(
        (made.index, made.name.to_string().as_str()),
        (CHILD, "net1")
    );
    let temporary = child::temporary_name(machine.pod.id().inode, "net1");
    assert_eq!(
        machine.kernel.changes(),
        [
            format!(
                "host: link add dev 1048583 name {temporary} link 700001 mtu 1500 \
                 type ipoib pkey 32769 mode datagram umcast 1"
            ),
            "host: link set dev 1048583 netns pod index 1048583 name net1".to_owned(),
        ]
    );
}

/// Kernels before 6.15 want the name in the parent's namespace, too.
#[test]
fn a_name_that_the_host_has_is_given_after_the_link_is_made() {
    let mut machine = Machine::new();
    machine
        .kernel
        .refuse("link add dev 1048583 name net1", libc::EEXIST, "");
    let made = machine.apply(&child(MACVLAN)).unwrap();
    assert_eq!(made.name, "net1");
    let changes = machine.kernel.changes();
    assert_eq!(
        changes.last().unwrap(),
        "pod: link set dev 1048583 name net1"
    );
}

#[test]
fn a_taken_index_is_undone_and_can_be_tried_again() {
    for kind in ALL {
        let mut machine = Machine::with(&nic(1));
        let other = Link {
            index: CHILD,
            name: "other".into(),
            ..Link::default()
        };
        machine.kernel.add_link("pod", &other);
        let child = child(kind);
        let refused = machine.apply(&child).unwrap_err();
        assert_eq!(refused.code, Code::TryAgain, "{}: {refused}", kind.kind());
        machine.undo(&child).unwrap();
        assert_eq!(machine.names(true), ["lo", "other"], "{}", kind.kind());
        assert_eq!(machine.names(false), ["lo", "ens1f0"], "{}", kind.kind());
    }
}

#[test]
fn a_child_is_found_and_removed_whatever_its_name() {
    for kind in ALL {
        let mut machine = Machine::new();
        let child = child(kind);
        let made = machine.apply(&child).unwrap();
        child.check(&made).unwrap();
        let renamed = Change::name(b"evil");
        link::change(&mut machine.inside, "rename", CHILD, &renamed).unwrap();
        machine.undo(&child).unwrap();
        assert_eq!(machine.names(true), ["lo"], "{}", kind.kind());
        let count = machine.kernel.changes().len();
        machine.undo(&child).unwrap();
        assert_eq!(machine.kernel.changes().len(), count, "nothing is left");
    }
}

#[test]
fn another_link_with_the_childs_name_is_neither_removed_nor_taken_for_it() {
    for kind in ALL {
        let mut machine = Machine::new();
        let decoy = Link {
            index: 9,
            name: "net1".into(),
            ..Link::default()
        };
        machine.kernel.add_link("pod", &decoy);
        let child = child(kind);
        let lost = child.check(&decoy).unwrap_err();
        assert_eq!(lost.code, Code::Differs, "{lost}");
        machine.undo(&child).unwrap();
        assert_eq!(machine.names(true), ["lo", "net1"], "{}", kind.kind());
    }
}

/// It is still on the host when ADD is killed between the two requests.
#[test]
fn an_ipoib_child_is_removed_from_the_host() {
    let mut machine = Machine::with(&nic(32));
    machine.kernel.refuse("netns pod", libc::EBUSY, "killed");
    let child = child(IPOIB);
    let refused = machine.apply(&child).unwrap_err();
    assert!(refused.msg.contains("killed"), "{refused}");
    machine.undo(&child).unwrap();
    assert_eq!(machine.names(false), ["lo", "ens1f0"]);
}

#[test]
fn a_refusal_says_what_can_be_done() {
    for (errno, code, text) in [
        (libc::EBUSY, Code::Kernel, "exclude each other"),
        (libc::ENODEV, Code::TryAgain, "quicker"),
        (libc::EOPNOTSUPP, Code::Kernel, "module is not loaded"),
    ] {
        let mut machine = Machine::new();
        machine.kernel.refuse("link add", errno, "");
        let refused = machine.apply(&child(MACVLAN)).unwrap_err();
        assert_eq!(refused.code, code, "{refused}");
        assert!(refused.details.contains(text), "{refused}");
    }
}

fn key() -> Key {
    let id = AttachmentId {
        container_id: ContainerId::parse("c1").unwrap(),
        ifname: IfName::parse("net1").unwrap(),
    };
    Key::of("rail0", &id).unwrap()
}

/// The NIC, claimed for the attachment.
fn claimed(machine: &mut Machine) -> Move {
    machine.show_nic(&["ens1f0", "rdma-dev700001", "rdma-dev700002"]);
    fs::create_dir_all(&machine.node.roots.proc).unwrap();
    let proc = machine.node.roots.proc.clone();
    let taken = machine.kernel.link("host", "ens1f0");
    let host = Snapshot::take(&mut machine.node.netns.socket, &proc, &taken).unwrap();
    let moved = Move {
        interface: Interface {
            name: "net1".into(),
            ..Interface::default()
        },
        host,
        hcas: Vec::new(),
        rdma: Vec::new(),
        slots: Vec::new(),
        returned: None,
    };
    let identity = &moved.host.identity;
    machine.node.journal.take(identity, &key()).unwrap();
    moved
}

fn apply_move(machine: &mut Machine, moved: &Move) -> Result<Link, Error> {
    let nic = moved.on_host(&mut machine.node)?;
    moved.apply(
        &mut machine.node.netns,
        &machine.pod,
        &mut machine.inside,
        &nic,
    )
}

#[test]
fn a_move_is_one_request_and_mtu_and_mac_another() {
    let mut machine = Machine::new();
    let mut moved = claimed(&mut machine);
    moved.interface.mtu = Some(1500);
    moved.interface.mac = "02:00:00:00:00:09".parse().ok();
    apply_move(&mut machine, &moved).unwrap();
    assert_eq!(
        machine.kernel.changes(),
        [
            "host: link set dev 700001 netns pod name net1",
            "pod: link set dev 700001 mtu 1500 address 02:00:00:00:00:09",
        ]
    );
    moved.check(&mut machine.node).unwrap();
}

#[test]
fn a_nic_that_left_the_host_can_be_tried_again() {
    let mut machine = Machine::new();
    let moved = claimed(&mut machine);
    apply_move(&mut machine, &moved).unwrap();
    let refused = apply_move(&mut machine, &moved).unwrap_err();
    assert_eq!(refused.code, Code::TryAgain, "{refused}");
}

#[test]
fn a_nic_returns_with_name_index_and_mtu_whatever_the_pod_did() {
    let mut machine = Machine::new();
    let moved = claimed(&mut machine);
    apply_move(&mut machine, &moved).unwrap();
    let changed = Change {
        mtu: Some(1280),
        mac: Some(&[2, 0, 0, 0, 0, 9]),
        alias: Some(b"evil"),
        ..Change::name(b"evil")
    };
    link::change(&mut machine.inside, "change", NIC, &changed).unwrap();
    let undone = |machine: &mut Machine| {
        let pod = Some(&machine.pod);
        moved.undo(&mut machine.node, &key(), pod, Duration::ZERO)
    };
    let returned = undone(&mut machine).unwrap();
    assert_eq!(returned.defect(), None, "{returned:?}");
    let home = machine.kernel.link("host", "ens1f0");
    assert_eq!((home.index, home.mtu), (NIC, 9000));
    assert_eq!((home.mac, home.alias), (nic(1).mac, None));
    assert_eq!(machine.names(true), ["lo"]);
    let count = machine.kernel.changes().len();
    // The claim is released: the NIC can be another attachment's.
    undone(&mut machine).unwrap();
    assert_eq!(machine.kernel.changes().len(), count);
}

#[test]
fn a_nic_whose_index_the_host_has_given_away_returns_with_another() {
    let mut machine = Machine::new();
    let moved = claimed(&mut machine);
    apply_move(&mut machine, &moved).unwrap();
    let other = Link {
        index: NIC,
        name: "veth1".into(),
        hardware: 1,
        ..Link::default()
    };
    machine.kernel.add_link("host", &other);
    let pod = Some(&machine.pod);
    let returned = moved
        .undo(&mut machine.node, &key(), pod, Duration::ZERO)
        .unwrap();
    let home = machine.kernel.link("host", "ens1f0");
    assert_ne!(home.index, NIC);
    let warned = |text: &String| text.contains("rules of nftables and tc");
    assert!(returned.warnings.iter().any(warned), "{returned:?}");
}
