//! Range arithmetic: lines are range, range_start, range_end and exclusions.
#![no_main]

use ipam::range::{Range, Spec};
use libfuzzer_sys::fuzz_target;
use node::policy::Profile;
use std::net::IpAddr;

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

fuzz_target!(|text: &str| {
    let mut lines = text.split('\n');
    let range = lines.next().unwrap_or_default();
    let mut bound = || lines.next().filter(|line| !line.is_empty());
    let (start, end) = (bound(), bound());
    let exclude: Vec<&str> = lines.collect();
    for profile in [Profile::Strict, Profile::Compatible] {
        let spec = Spec {
            per_node: None,
            range,
            start,
            end,
            exclude: &exclude,
            reserved: &[],
        };
        let Ok(read) = Range::new(&spec, profile) else {
            continue;
        };
        let subnet = read.subnet();
        let (first, last) = (number(subnet.network()), number(subnet.broadcast()));
        let mut before: Option<u128> = None;
        for span in read.spans() {
            assert!(span.first <= span.last, "{span:?}");
            assert!(
                first <= span.first && span.last <= last,
                "{span:?} is not in {subnet}"
            );
            assert!(
                before.is_none_or(|before| before < span.first),
                "{span:?} after {before:?}"
            );
            before = Some(span.last);
        }
        for excluded in &exclude {
            if let Ok(excluded) = excluded.trim().parse::<IpAddr>() {
                let given = |span: &ipam::range::Span| span.contains(number(excluded));
                assert!(
                    excluded.is_ipv4() != subnet.is_ipv4() || !read.spans().iter().any(given),
                    "{excluded} is excluded"
                );
            }
        }
        // What a range says of its window, said back, is the same window; but for addresses that
        // are IPv4 ones as soon as they are written (`::ffff:0:0/96`, as Go reads them).
        let (from, to) = read.window();
        let mapped =
            |address: IpAddr| matches!(address, IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some());
        if from < to
            && !mapped(from)
            && !mapped(to)
            && exclude.is_empty()
            && profile == Profile::Strict
        {
            let again = format!("{from}-{to}/{}", subnet.prefix());
            let again = Range::new(
                &Spec {
                    range: &again,
                    ..Spec::default()
                },
                profile,
            );
            assert_eq!(again.map(|range| range.window()), Ok((from, to)));
        }
    }
});
