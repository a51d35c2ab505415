//! What an ADD of a macvlan asks of the kernel, and nothing else: no journal, no policy, no IPAM,
//! no JSON. `bench-cni` sets `rdma-netdev` beside it.
//!
//! Arguments: the pod's namespace, the master, the interface's name, its address.

use std::env;
use std::path::Path;

use anyhow::{Context, Result};
use cni_wire::{CniResult, IpConfig};
use hca::Host;
use netlink::{
    Namespace, Socket,
    link::{self, By, Child, NewChild},
    rule,
};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::link::MacVlanMode;
use rdma_netdev::addressing::{Pod, Request, addressing};
use rdma_netdev::config::{Attach, ChildKind, Config};
use rdma_netdev::resolve::{HostLink, NodeNetwork};

fn main() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [pod, master, name, address] = arguments.as_slice() else {
        anyhow::bail!("expected: NETNS MASTER NAME ADDRESS/PREFIX");
    };
    let host = Host::live();
    let own = Namespace::current(&host.proc)?;
    let mut socket = Socket::open()?;
    let pod = Namespace::open(Path::new(pod))?.context("the namespace is gone")?;
    let mut inside = pod.socket(&own)?;
    link::get(&mut inside, By::Name(name.as_bytes()))?;
    let link = link::get(&mut socket, By::Name(master.as_bytes()))?.context("no master")?;
    let mut network = NodeNetwork::default();
    let found = HostLink::read(&host, &mut socket, link, false, &[], &mut network)?;
    let child = NewChild {
        name,
        index: link::random_index(),
        child: Child::Macvlan {
            mode: MacVlanMode::Bridge,
            broadcast_queue: None,
        },
        parent: found.link.index,
        parent_netns: Some(link::namespace_number(&mut inside, &own)?),
        mtu: None,
        mac: None,
    };
    let made = link::create(&mut inside, &child)?.context("it went away")?;
    let result = CniResult {
        ips: vec![IpConfig {
            address: address.parse().map_err(anyhow::Error::msg)?,
            gateway: None,
            interface: None,
        }],
        ..CniResult::default()
    };
    let config = Config {
        attach: Attach::Child(ChildKind::Macvlan),
        ..Config::default()
    };
    let request = Request {
        ifname: name,
        rail: None,
        config: &config,
        mtu: None,
        leased: Some(&result),
        moved: None,
    };
    let rules = rule::list(&mut inside, AddressFamily::Unspec)?;
    let there = Pod {
        tables: rules.iter().map(rule::table_of).collect(),
        ..Pod::default()
    };
    let all = addressing(&[request], &there)?;
    let interface = &all.first().context("no interface")?.interface;
    pod.enter(&own, || interface.apply(&mut inside, &host.proc, &made))??;
    Ok(())
}
