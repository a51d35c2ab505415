//! A network configuration that a namespace's user wrote: accepted or refused, the same each time.
#![no_main]

use cni_wire::{Command, Environment, NetworkConfig, Request};
use libfuzzer_sys::fuzz_target;
use rdma_netdev::config::Config;

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
    let (once, twice) = (Config::read(&request), Config::read(&request));
    assert_eq!(format!("{once:?}"), format!("{twice:?}"));
    if let Ok(config) = once {
        let _ = config.macvlan_mode();
        let _ = config.ipvlan_mode();
        let _ = config.ipoib_mode();
    }
    let _ = request.requested_ips();
    let _ = request.config.prev_result();
});
