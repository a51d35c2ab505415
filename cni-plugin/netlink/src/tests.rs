//! Indexes that are chosen: what the kernel does with them. Needs root, for namespaces of its own.

use std::{io, io::Write, path::Path};

use crate::{
    Namespace, Socket,
    link::{self, By, Change, Link},
};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoMacVlan, LinkAttribute, LinkInfo, LinkMessage, MacVlanMode,
};
use nix::{
    errno::Errno,
    sched::{CloneFlags, unshare},
};

/// A new namespace, in which this thread is then; none without the right to make one.
fn new_namespace() -> Option<(Namespace, Socket)> {
    match unshare(CloneFlags::CLONE_NEWNET) {
        Err(Errno::EPERM) => {
            let _ = writeln!(io::stderr(), "skipped: only root makes network namespaces");
            None
        }
        made => {
            made.unwrap();
            let namespace = Namespace::current(Path::new("/proc")).unwrap();
            Some((namespace, Socket::open().unwrap()))
        }
    }
}

fn nic(socket: &mut Socket, name: &str) -> Link {
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.into()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Veth)]),
    ];
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    socket.request("create", 16, flags, &message).unwrap();
    link::get(socket, By::Name(name.as_bytes()))
        .unwrap()
        .unwrap()
}

#[test]
fn a_link_moves_to_a_chosen_index_and_back() {
    let Some((host, mut outside)) = new_namespace() else {
        return;
    };
    let (first, second) = (nic(&mut outside, "d0"), nic(&mut outside, "d1"));
    let (pod, mut inside) = new_namespace().unwrap();
    let chosen = link::random_index();
    let into_pod = Change {
        netns: Some(&pod),
        new_index: Some(chosen),
        ..Change::name(b"net1")
    };
    link::change(&mut outside, "move d0", first.index, &into_pod).unwrap();
    let there = link::get(&mut inside, By::Index(chosen)).unwrap().unwrap();
    assert_eq!(there.name, "net1");
    let clash = Change {
        name: Some(b"net2"),
        ..into_pod
    };
    let refused = link::change(&mut outside, "move d1", second.index, &clash).unwrap_err();
    assert!(refused.is(libc::EBUSY), "{refused}");
    let home = Change {
        netns: Some(&host),
        new_index: Some(first.index),
        ..Change::name(b"d0")
    };
    link::change(&mut inside, "move net1", chosen, &home).unwrap();
    let back = link::get(&mut outside, By::Index(first.index)).unwrap();
    assert_eq!(back.unwrap().name, "d0");
}

#[test]
fn a_child_is_created_with_a_chosen_index() {
    let Some((host, mut outside)) = new_namespace() else {
        return;
    };
    let parent = nic(&mut outside, "d0");
    let (_pod, mut inside) = new_namespace().unwrap();
    let chosen = link::random_index();
    let number = link::namespace_number(&mut inside, &host).unwrap();
    let mode = vec![InfoMacVlan::Mode(MacVlanMode::Bridge)];
    let info = vec![
        LinkInfo::Kind(InfoKind::MacVlan),
        LinkInfo::Data(InfoData::MacVlan(mode)),
    ];
    let mut message = LinkMessage::default();
    message.header.index = chosen;
    message.attributes = vec![
        LinkAttribute::IfName("net1".into()),
        LinkAttribute::Link(parent.index),
        LinkAttribute::LinkNetNsId(number),
        LinkAttribute::LinkInfo(info),
    ];
    let flags = NLM_F_CREATE | NLM_F_EXCL;
    inside.request("create", 16, flags, &message).unwrap();
    let made = link::get(&mut inside, By::Index(chosen)).unwrap().unwrap();
    assert_eq!(
        (made.name.to_string(), made.parent),
        ("net1".into(), Some(parent.index))
    );
    message.attributes[0] = LinkAttribute::IfName("net2".into());
    let refused = inside.request("create", 16, flags, &message).unwrap_err();
    assert!(refused.is(libc::EEXIST), "{refused}");
}
