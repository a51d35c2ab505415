//! A network configuration that a namespace's user wrote: accepted or refused, the same each time;
//! against a host of two netdevs, of which the policy allows one, no plan is about the other; and what
//! `validate` accepts without a note is planned in full.
#![no_main]

use cni_wire::{Command, Environment, IfName, NetworkConfig, Request};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::path::Path;

use attachment::node::Places;
use hca::MacAddress;
use node::pattern::Pattern;
use node::policy::{Allow, Policy, Selector};
use rdma_netdev::authorize::{Asked, Rules, authorize};
use rdma_netdev::config::{Attach, ChildKind, Config, Target};
use rdma_netdev::plan::{self, Plan};
use rdma_netdev::resolve::{self, HostLink, Resolved};
use rdma_netdev::validate::{self, Network};

fuzz_target!(|text: &[u8]| {
    let Ok(config) = NetworkConfig::parse(text) else {
        return;
    };
    let environment = |name: &str| {
        Some(match name {
            "CNI_CONTAINERID" => "c".into(),
            "CNI_NETNS" => "/run/netns/n".into(),
            "CNI_IFNAME" => "net1".into(),
            "CNI_PATH" => "/opt/cni/bin".into(),
            _ => return None,
        })
    };
    let env = Environment::read(Command::Add, environment).expect("a good environment");
    let request = Request { env, config };
    let read = || Config::read(&request, &BTreeMap::new());
    let (once, twice) = (read(), read());
    assert_eq!(format!("{once:?}"), format!("{twice:?}"));
    if let Ok(config) = once {
        let _ = config.macvlan_mode();
        let _ = config.ipvlan_mode();
        let _ = config.ipoib_mode();
        only_what_is_allowed(&config);
        if let Ok(text) = std::str::from_utf8(text)
            && is_accepted(text)
        {
            planned_in_full(&config);
        }
    }
    let _ = request.config.prev_result();
});

/// Whether `rdmactl validate` has neither an error nor a note, without a node.
fn is_accepted(text: &str) -> bool {
    let Ok(object) = serde_json::from_str(text) else {
        return false;
    };
    let places = Places {
        root: "/nonexistent".into(),
        policy: node::policy::DEFAULT_PATH.into(),
        node: Some("node".to_owned()),
    };
    let network = Network::of(&object, "network");
    let found = validate::check(&network, &Policy::default(), &places, None);
    found.errors.is_empty() && found.notes.is_empty()
}

/// A netdev of the host.
fn host_link(name: &str, index: u32) -> HostLink {
    let mut host = HostLink::default();
    host.link.name = name.into();
    host.link.index = index;
    host.link.hardware = 1;
    host.link.bus_device = Some("0000:3b:00.0".to_owned());
    host
}

/// Which of the two a target means: whatever does not name the allowed one means the other, so that
/// every way to say it is a way to say the wrong one.
fn meant(target: Option<&Target>) -> HostLink {
    match target {
        Some(Target::Name(name)) if name == "allowed" => host_link("allowed", 2),
        _ => host_link("denied", 3),
    }
}

fn only_what_is_allowed(config: &Config) {
    let resolved = match config.attach {
        Attach::Move => Resolved::Move(meant(resolve::move_target(config).ok().as_ref())),
        Attach::Child(kind) => {
            let master = config.master.clone().map(Target::Name);
            Resolved::Child {
                kind,
                parent: meant(master.as_ref()),
            }
        }
        Attach::RdmaOnly => return,
    };
    let allow = Allow {
        non_rdma: true,
        virtual_links: true,
        unallocated: true,
        passthru: true,
        netdevs: Some(vec![Selector {
            if_names: Pattern::parse("allowed").into_iter().collect(),
            ..Selector::default()
        }]),
        ..Allow::default()
    };
    let rules = Rules {
        allow: &allow,
        path: Path::new("/etc/rdma-netdev/policy.json"),
        exclusive: &[],
    };
    let kubelet = || unreachable!("the policy lifts it");
    let asked = Asked {
        config: &Config::default(),
        moves_rdma: false,
    };
    let allowed = authorize(&resolved, asked, rules, kubelet).is_ok();
    let name = resolved.host_link().map(|host| host.link.name.to_string());
    assert_eq!(allowed, name.as_deref() == Some("allowed"));
    let checked = plan::check(&resolved, config, &allow).is_ok();
    if allowed
        && checked
        && let Ok(plan) = planned(config, resolved)
    {
        let host = plan.resolved.host_link().expect("a link");
        assert_eq!(host.link.name, "allowed");
    }
}

fn planned(config: &Config, resolved: Resolved) -> Result<Plan, String> {
    let ifname = IfName::parse("net1").expect("a name");
    let random = || Ok(MacAddress::new([2, 0, 0, 0, 0, 1]));
    let plan = Plan::of(config.clone(), resolved, ifname, random);
    plan.map_err(|error| error.to_string())
}

/// On a link that carries everything, the plan has what the network says.
fn planned_in_full(config: &Config) {
    let kind = match config.attach {
        Attach::Child(kind) => kind,
        Attach::Move => {
            let mut nic = host_link("nic", 2);
            nic.link.max_mtu = 65535;
            return plan::check(&Resolved::Move(nic), config, &Allow::default()).expect("a move");
        }
        Attach::RdmaOnly => return,
    };
    let mut host = host_link("nic", 2);
    host.link.mtu = 65535;
    host.link.hardware = if kind == ChildKind::Ipoib { 32 } else { 1 };
    let resolved = Resolved::Child { kind, parent: host };
    plan::check(&resolved, config, &Allow::default()).expect("a child");
    let made = planned(config, resolved).expect("a plan");
    assert_eq!(made.config.mtu, config.mtu);
    assert!(config.mac.is_none() || made.mac == config.mac);
}
