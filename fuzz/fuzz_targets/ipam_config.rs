//! A network configuration's `ipam` object: what is accepted can be served.
#![no_main]

use cni_wire::{NetworkConfig, Section};
use ipam::config::Config;
use libfuzzer_sys::fuzz_target;
use node::policy::{Policy, Profile};

fuzz_target!(|text: &[u8]| {
    let Ok(config) = NetworkConfig::parse(text) else {
        return;
    };
    let Ok(read) = Config::read(&config, &Section::absent("flat"), &Policy::default()) else {
        return;
    };
    assert!(
        !read.ranges.is_empty() || !read.fixed.is_empty() || read.profile == Profile::Compatible
    );
    for range in &read.ranges {
        if read.profile == Profile::Strict {
            let lowest = range.lowest().expect("a strict range gives something");
            assert!(
                range.subnet().contains(lowest),
                "{lowest} is not in {}",
                range.subnet()
            );
            assert_ne!(Some(lowest), read.gateway, "the gateway is given out");
        }
        for span in range.spans() {
            assert!(span.first <= span.last, "{span:?}");
        }
    }
});
