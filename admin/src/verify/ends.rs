//! What an end has: its RDMA devices, their ports and GIDs, and the tools.
//!
//! Read by a shell script at the place itself: the pods that are tested have a shell and the
//! tools, not our program. It starts no process for a GID, because a table has 256 of them.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv6Addr};

/// Writes one line for each fact. Read errors are usual: an empty entry of a GID table, and the
/// attributes of GIDs that belong to another network namespace.
pub(super) const PROBE: &str = r#"
get() { v=; { read -r v <"$1"; } 2>/dev/null; }
for tool in ping rping ib_write_bw; do command -v $tool >/dev/null 2>&1 && echo "tool $tool"; done
[ -c /dev/infiniband/rdma_cm ] && echo "cm"
for u in /sys/class/infiniband_verbs/uverbs*; do
  [ -c "/dev/infiniband/${u##*/}" ] || continue
  get "$u/ibdev"; echo "open $v"
done
for d in /sys/class/infiniband/*; do
  [ -e "$d/ports" ] || continue
  n=${d##*/}
  get "$d/node_desc"; case $v in rxe*|siw*|Software*) echo "soft $n";; esac
  for p in "$d"/ports/*; do
    get "$p/state"; s=$v; get "$p/rate"; r=$v; get "$p/link_layer"
    layer=$v; get "$p/sm_lid"
    echo "port $n ${p##*/} ${s%%:*} ${r%% *} $layer $v"
    [ "$layer" = InfiniBand ] && get "$p/gids/0" && echo "portgid $n ${p##*/} $v" && continue
    for g in "$p"/gids/*; do
      get "$g"
      case $v in ''|0000:0000:0000:0000:0000:0000:0000:0000|fe80:0000:0000:0000:0000:0000:0000:0000) continue;; esac
      gid=$v i=${g##*/}
      get "$p/gid_attrs/ndevs/$i"; [ -n "$v" ] || continue
      ndev=$v; get "$p/gid_attrs/types/$i"; type=$v; get "/sys/class/net/$ndev/mtu"
      echo "gid $n ${p##*/} $i $gid $ndev ${v:-0} $type"
    done
  done
done
for n in /sys/class/net/*; do
  get "$n/type"; [ "$v" = 32 ] && get "$n/address" && echo "ipoib ${n##*/} $v"
done
ip -o addr show 2>/dev/null | while read -r _ ndev family address _; do
  case $family in inet|inet6) echo "address $ndev ${address%%/*}";; esac
done
while read -r line; do echo "fib $line"; done 2>/dev/null </proc/net/fib_trie
while read -r address _ _ _ _ ndev; do echo "inet6 $address $ndev"; done 2>/dev/null </proc/net/if_inet6
exit 0
"#;

const MOST_PORTS: usize = 256;
/// Why a port of another container is left out.
const NOT_OPEN: &str = "its node is not in /dev/infiniband";

/// A port that may be tested.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Port {
    /// RDMA device.
    pub device: String,
    /// Number of the port.
    pub port: u32,
    /// The netdev it is used through; `None` on InfiniBand without IPoIB.
    pub netdev: Option<String>,
    /// Bytes, of the netdev.
    pub mtu: Option<u32>,
    /// Index of the GID, on Ethernet.
    pub gid_index: Option<u32>,
    /// Address of the netdev that the GID is made of.
    pub address: Option<IpAddr>,
    /// Nominal rate in Gb/s.
    pub rate: Option<f64>,
    /// A driver without hardware.
    pub soft: bool,
}

impl Port {
    /// The netdev's name, the same on one rail of all pods.
    pub(super) fn rail(&self) -> String {
        let port = || format!("{}/{}", self.device, self.port);
        self.netdev.clone().unwrap_or_else(port)
    }

    /// As it is named in what is printed.
    pub(super) fn name(&self) -> String {
        match &self.netdev {
            Some(netdev) => format!("{netdev} ({}/{})", self.device, self.port),
            None => format!("{}/{}", self.device, self.port),
        }
    }
}

/// An end.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct End {
    /// Tools it has.
    pub tools: Vec<String>,
    /// `/dev/infiniband/rdma_cm` is there.
    pub connection_manager: bool,
    /// An address at which it is reached, where the port has none.
    pub control: Option<IpAddr>,
    /// Ports that may be tested.
    pub ports: Vec<Port>,
    /// Why other ports may not.
    pub left: Vec<String>,
}

impl End {
    pub(super) fn rails(&self) -> impl Iterator<Item = String> {
        self.ports.iter().map(Port::rail)
    }

    /// Why ports of its own may not be tested.
    pub(super) fn faults(&self) -> Vec<&str> {
        let left = self.left.iter().map(String::as_str);
        left.filter(|why| !why.ends_with(NOT_OPEN)).collect()
    }
}

/// Reads what [`PROBE`] wrote; with a netdev's name, only what is used through it.
pub(super) fn read(text: &str, interface: Option<&str>, device: Option<&str>) -> End {
    let lines = text.lines().map(|line| line.split_whitespace().collect());
    let lines: Vec<Vec<&str>> = lines.collect();
    let of = |key: &'static str| {
        let lines = lines.iter();
        lines.filter_map(move |words| words.split_first().filter(|(k, _)| **k == key))
    };
    let names = |key: &'static str| of(key).filter_map(|(_, rest)| rest.first().copied());
    let own = own_addresses(&lines);
    let gids: Vec<Port> = of("gid").filter_map(|(_, rest)| gid(rest, &own)).collect();
    let soft: Vec<&str> = names("soft").collect();
    let open: Vec<&str> = names("open").collect();
    let mut end = End {
        tools: names("tool").map(str::to_owned).collect(),
        connection_manager: of("cm").next().is_some(),
        control: of("address").find_map(|(_, rest)| reachable(rest)),
        ..End::default()
    };
    // No host has more: its answer is not trusted.
    for (_, rest) in of("port").take(MOST_PORTS) {
        let [name, number, state, rate, layer, subnet @ ..] = rest else {
            continue;
        };
        let Ok(number) = number.parse::<u32>() else {
            continue;
        };
        if device.is_some_and(|wanted| wanted != *name) {
            continue;
        }
        if !open.contains(name) {
            end.left.push(format!("{name}: {NOT_OPEN}"));
            continue;
        }
        // ib_verbs.h: 4 is ACTIVE.
        if *state != "4" {
            let why = match (*layer, subnet) {
                ("InfiniBand", ["0x0" | "0"]) => ", SM lid 0: no subnet manager",
                _ => "",
            };
            let left = format!("{name}/{number}: its port is not ACTIVE (state {state}{why})");
            end.left.push(left);
            continue;
        }
        let base = Port {
            device: (*name).to_owned(),
            port: number,
            rate: rate.parse().ok(),
            soft: soft.contains(name),
            ..Port::default()
        };
        let found = if *layer == "InfiniBand" {
            let is_own = |rest: &&[&str]| matches!(rest, [of, at, _] if of == name && *at == base.port.to_string());
            let gid = of("portgid").map(|(_, rest)| rest).find(is_own);
            let gid = gid.and_then(|rest| rest.last()?.parse().ok());
            ipoib(&base, gid, &lines)
        } else {
            roce(&base, &gids)
        };
        if found.is_empty() {
            end.left.push(format!(
                "{name}/{number}: no RoCE v2 GID of an address of this network namespace"
            ));
        }
        let is_wanted =
            |port: &Port| interface.is_none_or(|wanted| port.netdev.as_deref() == Some(wanted));
        end.ports.extend(found.into_iter().filter(is_wanted));
    }
    if let Some(wanted) = device
        && end.ports.is_empty()
        && end.left.is_empty()
    {
        end.left.push(format!("no port of an RDMA device {wanted}"));
    }
    end.ports
        .sort_by(|a, b| (&a.netdev, &a.device, a.port).cmp(&(&b.netdev, &b.device, b.port)));
    end.ports.truncate(MOST_PORTS);
    end
}

/// The addresses of the place's network namespace. A port's table also has those of other
/// namespaces, and names their netdevs, which have the same name in each pod.
fn own_addresses(lines: &[Vec<&str>]) -> BTreeSet<IpAddr> {
    let mut own = BTreeSet::new();
    let mut last = None;
    for line in lines {
        match line.as_slice() {
            // fib_trie: an address, and below it what it is.
            ["fib", "|--", address] => last = address.parse().ok(),
            ["fib", "/32", "host", "LOCAL"] => own.extend(last.map(IpAddr::V4)),
            ["inet6", digits, ..] => {
                let address = u128::from_str_radix(digits, 16);
                own.extend(address.ok().map(|bits| IpAddr::V6(bits.into())));
            }
            _ => {}
        }
    }
    own
}

fn reachable(words: &[&str]) -> Option<IpAddr> {
    let address: IpAddr = words.get(1)?.parse().ok()?;
    let inner =
        address.is_loopback() || matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local());
    (!inner).then_some(address)
}

/// A RoCE v2 GID of an address of its own and of more than one link, as a port that has it.
fn gid(words: &[&str], own: &BTreeSet<IpAddr>) -> Option<Port> {
    let [device, port, index, gid, netdev, mtu, "RoCE", "v2"] = words else {
        return None;
    };
    let gid: Ipv6Addr = gid.parse().ok()?;
    let address = gid.to_ipv4_mapped().map_or(IpAddr::V6(gid), IpAddr::V4);
    let usable = own.contains(&address) && !gid.is_unicast_link_local();
    usable.then_some(Port {
        device: (*device).to_owned(),
        port: port.parse().ok()?,
        netdev: Some((*netdev).to_owned()),
        mtu: mtu.parse().ok().filter(|mtu| *mtu > 0),
        gid_index: Some(index.parse().ok()?),
        address: Some(address),
        ..Port::default()
    })
}

/// A port as each netdev sees it: by its RoCE v2 GID of an IPv4 address, else of a global IPv6
/// one.
fn roce(base: &Port, gids: &[Port]) -> Vec<Port> {
    let mut ports: Vec<Port> = Vec::new();
    let is_ipv4 = |port: &Port| port.address.is_some_and(|address| address.is_ipv4());
    for gid in gids {
        if (&gid.device, gid.port) != (&base.device, base.port) {
            continue;
        }
        let port = Port {
            rate: base.rate,
            soft: base.soft,
            ..gid.clone()
        };
        match ports.iter_mut().find(|known| known.netdev == port.netdev) {
            Some(known) if !is_ipv4(known) && is_ipv4(&port) => *known = port,
            Some(_) => {}
            None => ports.push(port),
        }
    }
    ports
}

/// A port as each IPoIB netdev on it sees it, a child in a pod too: the last 8 bytes of such a netdev's
/// hardware address are its port's GUID (RFC 4391, 9.1.1). Alone, if there is none.
fn ipoib(base: &Port, gid: Option<Ipv6Addr>, lines: &[Vec<&str>]) -> Vec<Port> {
    let guid = gid.map(|gid| {
        let bytes = gid.octets();
        let digits = bytes[8..].iter().map(|byte| format!(":{byte:02x}"));
        digits.collect::<String>()
    });
    let is_on = |address: &str| guid.as_ref().is_some_and(|guid| address.ends_with(guid));
    let netdevs = lines.iter().filter_map(|line| match line.as_slice() {
        ["ipoib", netdev, address] if is_on(address) => Some(*netdev),
        _ => None,
    });
    let address = |netdev: &str| {
        lines.iter().find_map(|line| match line.as_slice() {
            ["address", on, address] if *on == netdev => address.parse().ok(),
            _ => None,
        })
    };
    let port = |netdev: &str| Port {
        netdev: Some(netdev.to_owned()),
        address: address(netdev),
        ..base.clone()
    };
    let ports: Vec<Port> = netdevs.map(port).collect();
    match ports.is_empty() {
        true => vec![base.clone()],
        false => ports,
    }
}

/// Which port is tested against which: those of one rail; in their order where no name is common.
pub(super) fn pairs<'a>(server: &'a End, client: &'a End) -> Vec<(&'a Port, &'a Port)> {
    let same = |ours: &'a Port| {
        let mut theirs = client.ports.iter();
        Some((ours, theirs.find(|theirs| theirs.rail() == ours.rail())?))
    };
    let by_name: Vec<(&Port, &Port)> = server.ports.iter().filter_map(same).collect();
    match by_name.is_empty() {
        true => server.ports.iter().zip(&client.ports).collect(),
        false => by_name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POD: &str = "tool ping\ntool ib_write_bw\ncm\nopen mlx5_1\n\
        port mlx5_0 1 4 400 Ethernet\nport mlx5_1 1 4 400 Ethernet\n\
        gid mlx5_0 1 3 0000:0000:0000:0000:0000:ffff:0a00:0001 eth1 9000 RoCE v2\n\
        gid mlx5_1 1 0 fe80:0000:0000:0000:0042:acff:fe11:0002 net1 9000 IB/RoCE v1\n\
        gid mlx5_1 1 1 fe80:0000:0000:0000:0042:acff:fe11:0002 net1 9000 RoCE v2\n\
        gid mlx5_1 1 4 fd00:0000:0000:0000:0000:0000:0000:0007 net1 9000 RoCE v2\n\
        gid mlx5_1 1 6 0000:0000:0000:0000:0000:ffff:c0a8:6f02 net1 9000 IB/RoCE v1\n\
        gid mlx5_1 1 7 0000:0000:0000:0000:0000:ffff:c0a8:6f02 net1 9000 RoCE v2\n\
        gid mlx5_1 1 9 0000:0000:0000:0000:0000:ffff:c0a8:6f03 net1 9000 RoCE v2\n\
        fib Local:\nfib +-- 0.0.0.0/0 2 0 2\nfib |-- 192.168.111.2\nfib /32 host LOCAL\n\
        fib |-- 192.168.111.255\nfib /32 link BROADCAST\n\
        inet6 fd000000000000000000000000000007 net1\n";

    #[test]
    fn a_pods_own_devices_are_tested_by_its_own_gid() {
        let end = read(POD, None, None);
        assert!(end.connection_manager);
        assert_eq!(end.tools, ["ping", "ib_write_bw"]);
        assert_eq!(
            end.ports,
            [Port {
                device: "mlx5_1".into(),
                port: 1,
                netdev: Some("net1".into()),
                mtu: Some(9000),
                gid_index: Some(7),
                address: Some("192.168.111.2".parse().unwrap()),
                rate: Some(400.0),
                soft: false,
            }]
        );
        assert_eq!(end.left, ["mlx5_0: its node is not in /dev/infiniband"]);
        assert!(read(POD, Some("net2"), None).ports.is_empty());
        assert!(read(POD, None, Some("mlx5_0")).ports.is_empty());
    }

    #[test]
    fn gids_of_other_pods_are_not_taken_for_the_pods_own() {
        let other = POD.replace("192.168.111.2\n", "192.168.111.3\n");
        let port = read(&other, None, None).ports.remove(0);
        assert_eq!(
            port.gid_index,
            Some(9),
            "the netdev has the same name in both"
        );
        let by_v6 = POD.replace("192.168.111.2\n", "10.0.0.1\n");
        let port = read(&by_v6, None, None).ports.remove(0);
        assert_eq!(port.gid_index, Some(4));
    }

    #[test]
    fn a_port_that_cannot_be_tested_says_why() {
        let text = "open a\nopen b\nopen c\nport a 1 1 100 Ethernet\nport b 1 4 100 Ethernet\n\
            port c 1 2 100 InfiniBand 0x0\n\
            gid b 1 0 fe80:0000:0000:0000:0000:0000:0000:0001 net1 1500 RoCE v2\n";
        let end = read(text, None, None);
        assert!(end.ports.is_empty());
        assert_eq!(
            end.left,
            [
                "a/1: its port is not ACTIVE (state 1)",
                "b/1: no RoCE v2 GID of an address of this network namespace",
                "c/1: its port is not ACTIVE (state 2, SM lid 0: no subnet manager)",
            ]
        );
    }

    #[test]
    fn infiniband_has_the_address_of_its_ipoib() {
        let text = "open mlx5_0\nport mlx5_0 1 4 200 InfiniBand 0x1\n\
            portgid mlx5_0 1 fe80:0000:0000:0000:5054:00ff:fe00:0100\n\
            ipoib net2 80:00:00:1b:fe:80:00:00:00:00:00:00:50:54:00:ff:fe:00:01:01\n\
            ipoib net1 80:00:00:1a:fe:80:00:00:00:00:00:00:50:54:00:ff:fe:00:01:00\n\
            address net2 10.5.0.3\naddress net1 10.5.0.2\n";
        let mut ports = read(text, None, None).ports;
        assert_eq!(ports.len(), 1, "net2 is of another port: {ports:?}");
        let port = ports.remove(0);
        assert_eq!(port.address, Some("10.5.0.2".parse().unwrap()));
        assert_eq!(port.gid_index, None);
        assert_eq!(port.name(), "net1 (mlx5_0/1)");
        let without: Vec<&str> = text.lines().filter(|line| !line.contains("net1")).collect();
        let port = read(&without.join("\n"), None, None).ports.remove(0);
        assert_eq!((port.netdev, port.address), (None, None));
    }

    #[test]
    fn rails_are_paired_by_name() {
        let port = |netdev: &str, device: &str| Port {
            device: device.into(),
            port: 1,
            netdev: Some(netdev.into()),
            mtu: None,
            gid_index: None,
            address: None,
            rate: None,
            soft: false,
        };
        let end = |ports: Vec<Port>| End {
            ports,
            ..End::default()
        };
        let names = |server: &End, client: &End| {
            pairs(server, client)
                .iter()
                .map(|(a, b)| format!("{}-{}", a.device, b.device))
                .collect::<Vec<_>>()
        };
        let server = end(vec![port("net1", "a"), port("net2", "b")]);
        assert_eq!(
            names(&server, &end(vec![port("net2", "c"), port("net3", "d")])),
            ["b-c"]
        );
        assert_eq!(
            names(&server, &end(vec![port("eth1", "c")])),
            ["a-c"],
            "names differ: by order"
        );
    }
}
