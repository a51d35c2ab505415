//! Which netdevs carry a default route, from the tables that `/proc/<pid>/net` prints.
//!
//! They are those of process 1: this process may be in a container with a network namespace of its
//! own, and the roots of a host mounted elsewhere have their own process 1.

use std::path::Path;

/// `RTF_REJECT`: a route that exists to refuse (`include/uapi/linux/route.h`).
const REJECT: u32 = 0x0200;

/// Netdevs of IPv4 and IPv6 default routes; none if the tables cannot be read.
pub(super) fn default_netdevs(proc: &Path) -> Vec<String> {
    let table = |name: &str| {
        std::fs::read_to_string(proc.join("1/net").join(name))
            .or_else(|_| std::fs::read_to_string(proc.join("net").join(name)))
            .unwrap_or_default()
    };
    let mut netdevs: Vec<String> = ipv4(&table("route"))
        .chain(ipv6(&table("ipv6_route")))
        .collect();
    netdevs.sort();
    netdevs.dedup();
    netdevs
}

fn ipv4(table: &str) -> impl Iterator<Item = String> {
    table.lines().skip(1).filter_map(|line| {
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let [netdev, destination, _, flags, _, _, _, mask, ..] = columns.as_slice() else {
            return None;
        };
        let default = *destination == "00000000" && *mask == "00000000" && carries(flags);
        default.then(|| (*netdev).to_owned())
    })
}

fn ipv6(table: &str) -> impl Iterator<Item = String> {
    table.lines().filter_map(|line| {
        let columns: Vec<&str> = line.split_ascii_whitespace().collect();
        let [destination, length, _, _, _, _, _, _, flags, netdev] = columns.as_slice() else {
            return None;
        };
        let zero = destination.bytes().all(|digit| digit == b'0') && *length == "00";
        (zero && *netdev != "lo" && carries(flags)).then(|| (*netdev).to_owned())
    })
}

fn carries(flags: &str) -> bool {
    u32::from_str_radix(flags, 16).is_ok_and(|flags| flags & REJECT == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_routes_are_told_from_others() {
        let dir = tempfile::tempdir().unwrap();
        let net = dir.path().join("1/net");
        std::fs::create_dir_all(&net).unwrap();
        std::fs::write(
            net.join("route"),
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
             eno1\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
             ens2\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
             tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n",
        )
        .unwrap();
        let zero = "0".repeat(32);
        std::fs::write(
            net.join("ipv6_route"),
            format!(
                "{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 \
                 00000003      bond0\n\
                 fe80{} 40 {zero} 00 {zero} 00000100 00000001 00000000 00000001     ens3\n\
                 {zero} 00 {zero} 00 {zero} ffffffff 00000001 00000000 00200200       lo\n",
                "0".repeat(28)
            ),
        )
        .unwrap();
        assert_eq!(default_netdevs(dir.path()), ["bond0", "eno1"]);
    }

    #[test]
    fn no_table_means_no_uplink() {
        assert!(default_netdevs(Path::new("/nonexistent")).is_empty());
    }
}
