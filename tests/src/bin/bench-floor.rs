//! What an ADD of a macvlan asks of the kernel, and nothing else: no journal, no policy, no IPAM,
//! no JSON. `bench-cni` sets `rdma-netdev` beside it.
//!
//! Arguments: the pod's namespace, the master, the interface's name, its address.

use std::env;
use std::path::Path;

use anyhow::{Context, Result};
use attachment::{
    node::HostNetns,
    part::{Child, ChildLink, Interface, MacvlanMode, Parent},
};
use cni_wire::{CniResult, IpConfig};
use hca::Host;
use netlink::{
    Namespace, Socket,
    link::{self, By},
};
use node::policy::Allow;
use rdma_netdev::addressing::{self, addressing};
use rdma_netdev::config::{Attach, ChildKind, Config};
use rdma_netdev::facts::{HostLink, NodeNetwork};

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [pod, master, name, address] = arguments.as_slice() else {
        anyhow::bail!("expected: NETNS MASTER NAME ADDRESS/PREFIX");
    };
    let host = Host::live();
    let mut netns = HostNetns {
        namespace: Namespace::current(&host.proc)?,
        socket: Socket::open()?,
    };
    let pod = Namespace::open(Path::new(pod))?.context("the namespace is gone")?;
    let mut inside = pod.socket(&netns.namespace)?;
    link::get(&mut inside, By::Name(name.as_bytes()))?;
    let link = link::get(&mut netns.socket, By::Name(master.as_bytes()))?.context("no master")?;
    let mut network = NodeNetwork::default();
    let allow = Allow::default();
    let found = HostLink::read(&host, &mut netns.socket, link, &allow, &[], &mut network)?;
    let config = Config {
        attach: Attach::Child(ChildKind::Macvlan),
        ..Config::default()
    };
    let leased = CniResult {
        ips: vec![IpConfig {
            address: address.parse().map_err(anyhow::Error::msg)?,
            gateway: None,
            interface: None,
        }],
        ..CniResult::default()
    };
    let request = addressing::Request {
        ifname: name,
        rail: None,
        config: &config,
        mtu: Some(found.link.mtu),
        leased: Some(&leased),
        moved: None,
    };
    let given = addressing(&[request], &addressing::Pod::default())?;
    let given = given.into_iter().next().context("an interface")?;
    let child = Child {
        interface: Interface {
            name: name.clone(),
            mtu: Some(found.link.mtu),
            config: given.interface,
            ..Interface::default()
        },
        link: ChildLink::Macvlan {
            mode: MacvlanMode::Bridge,
            broadcast_queue: None,
        },
        parent: Parent {
            name: master.clone(),
            index: found.link.index,
        },
        index: link::random_index(),
        slots: Vec::new(),
        may_lack_carrier: false,
        warning: None,
    };
    let made = child.apply(&mut netns, &pod, &mut inside)?;
    let config = &child.interface.config;
    pod.enter(&netns.namespace, || {
        config.apply(&mut inside, &host.proc, &made)
    })??;
    Ok(())
}
