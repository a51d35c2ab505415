//! A network configuration that a namespace's user wrote: accepted or refused, the same each time;
//! against a host of two netdevs, of which the policy allows one, no plan is about the other; and what
//! is accepted without a NIC is decided in full on a NIC that carries everything.
#![no_main]

use attachment::part::MacvlanMode;
use cni_wire::{Command, Environment, NetworkConfig, Request};
use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::path::Path;

use hca::MacAddress;
use node::pattern::Pattern;
use node::policy::{Allow, Policy, Selector};
use rdma_netdev::config::{Attach, ChildKind, Config, Target};
use rdma_netdev::decide::decide;
use rdma_netdev::facts::{self, Facts, Found, HostLink, Movable, MovableState, Nic};

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
        let _ = config.mode::<MacvlanMode>();
        only_what_is_allowed(&config);
        let policy = Policy::default();
        if decide(&config, &Facts::without_pod(&policy, policy_path())).is_ok() {
            planned_in_full(&config);
        }
    }
    let _ = request.config.prev_result();
});

fn policy_path() -> &'static Path {
    Path::new(node::policy::DEFAULT_PATH)
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

/// A NIC with this netdev; none where the network asks for RDMA devices alone.
fn nic(config: &Config, link: HostLink) -> Option<Nic> {
    let found = match config.attach {
        Attach::Move => Found::Move(Box::new(Movable {
            link,
            dependent: None,
            state: Ok(MovableState::default()),
        })),
        Attach::Child(kind) => Found::Child(kind, Box::new(link)),
        Attach::RdmaOnly => return None,
    };
    Some(Nic {
        unit: None,
        is_of_unit: true,
        found,
        random: (1 << 20, MacAddress::new([2, 0, 0, 0, 0, 1])),
    })
}

fn only_what_is_allowed(config: &Config) {
    let target = match config.attach {
        Attach::Move => facts::move_target(config, None).ok(),
        Attach::Child(_) | Attach::RdmaOnly => config.master.clone().map(Target::Name),
    };
    let mut link = meant(target.as_ref());
    link.is_selected = link.link.name == *"allowed";
    let Some(nic) = nic(config, link) else {
        return;
    };
    let policy = Policy {
        allow: Allow {
            non_rdma: true,
            virtual_links: true,
            unallocated: true,
            passthru: true,
            netdevs: Some(vec![Selector {
                if_names: Pattern::parse("allowed").into_iter().collect(),
                ..Selector::default()
            }]),
            ..Allow::default()
        },
        ..Policy::default()
    };
    let facts = Facts {
        nics: vec![nic],
        ..Facts::without_pod(&policy, policy_path())
    };
    if let Ok(parts) = decide(config, &facts) {
        let netdevs = parts.iter().filter_map(|part| part.netdev());
        assert!(netdevs.into_iter().all(|netdev| netdev == "allowed"));
    }
}

/// On a link that carries everything, of a pod that has the HCA, the parts are what the network says.
fn planned_in_full(config: &Config) {
    let is_ipoib = config.attach == Attach::Child(ChildKind::Ipoib);
    let mut link = host_link("nic", 2);
    link.is_selected = true;
    link.link.mtu = 65535;
    link.link.max_mtu = 65535;
    link.link.hardware = if is_ipoib || config.vf.node_guid.is_some() {
        32
    } else {
        1
    };
    let Some(nic) = nic(config, link) else {
        return;
    };
    let mut policy = Policy::default();
    policy.allow.non_rdma = true;
    policy.allow.unallocated = true;
    let facts = Facts {
        nics: vec![nic],
        ..Facts::without_pod(&policy, policy_path())
    };
    // What an RDMA device or a VF is needed for is not said of this one.
    let Ok(parts) = decide(config, &facts) else {
        return;
    };
    let [part] = parts.as_slice() else {
        return;
    };
    let interface = part.interface().expect("an interface");
    assert!(config.mtu.is_none() || interface.mtu == config.mtu);
    assert!(config.mac.is_none() || interface.mac == config.mac);
}
