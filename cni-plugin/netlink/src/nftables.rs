//! What nftables has on a netdev: chains of the families `netdev` and `inet` that are hooked to it, and
//! flow tables.
//!
//! Before Linux 6.16 both lose a netdev that changes its namespace for good, and a chain with no
//! netdev left ends with its rules (`nf_tables_netdev_event()`).

use super::{
    Name, Result, Socket,
    attribute::{self, Raw},
};

/// `NFNL_SUBSYS_NFTABLES << 8` (`include/uapi/linux/netfilter/nfnetlink.h`)
const NFTABLES: u16 = 10 << 8;
/// `NFT_MSG_GETCHAIN`, `NFT_MSG_GETFLOWTABLE` (`include/uapi/linux/netfilter/nf_tables.h`)
const GETCHAIN: u16 = NFTABLES | 4;
const GETFLOWTABLE: u16 = NFTABLES | 23;
/// `sizeof(struct nfgenmsg)`
const HEADER_BYTES: usize = 4;
/// `NFPROTO_UNSPEC`, `NFPROTO_INET`, `NFPROTO_NETDEV`
const ANY: u8 = 0;
const INET: u8 = 1;
const NETDEV: u8 = 5;
/// `NFTA_CHAIN_TABLE`, `NFTA_FLOWTABLE_TABLE`
const TABLE: u16 = 1;
const DEVICE_NAME: u16 = 1;

/// Where the name and the netdevs of an object stand in its message.
struct Form {
    what: &'static str,
    get: u16,
    name: u16,
    hook: u16,
    devices: u16,
}

/// `NFTA_CHAIN_NAME`, `NFTA_CHAIN_HOOK`, `NFTA_HOOK_DEVS`
const CHAIN: Form = Form {
    what: "chain",
    get: GETCHAIN,
    name: 3,
    hook: 4,
    devices: 4,
};
/// `NFTA_FLOWTABLE_NAME`, `NFTA_FLOWTABLE_HOOK`, `NFTA_FLOWTABLE_HOOK_DEVS`
const FLOW_TABLE: Form = Form {
    what: "flow table",
    get: GETFLOWTABLE,
    name: 2,
    hook: 3,
    devices: 3,
};

/// Chains and flow tables, as text, on a netdev of the namespace the thread is in; none on a kernel without
/// nftables.
pub fn on(netdev: &Name) -> Result<Vec<String>> {
    let Some(mut socket) = Socket::open_netfilter()? else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for (form, family) in [(&CHAIN, NETDEV), (&CHAIN, INET), (&FLOW_TABLE, ANY)] {
        let what = format!("list nftables {}s", form.what);
        let listed = socket.dump(what, form.get, &Raw::new(&[family, 0, 0, 0]), |payload| {
            let payload = payload.get(HEADER_BYTES..).unwrap_or_default();
            Ok(parse(form, payload, netdev))
        });
        match listed {
            Ok(listed) => found.extend(listed),
            // The module is not there (`nfnetlink_rcv_msg()`), or an object is newer than it.
            Err(e) if e.is(libc::EINVAL) || e.is(libc::EOPNOTSUPP) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}

/// An object, if it is hooked to the netdev. Pure.
fn parse(form: &Form, payload: &[u8], netdev: &Name) -> Option<String> {
    let (mut table, mut name, mut hooked) = (Name::default(), Name::default(), false);
    attribute::each(payload, |kind, value| match kind {
        TABLE => table = Name::of_attribute(value),
        kind if kind == form.name => name = Name::of_attribute(value),
        kind if kind == form.hook => attribute::each(value, |kind, value| {
            if kind == form.devices {
                attribute::each(value, |kind, value| {
                    hooked |= kind == DEVICE_NAME && Name::of_attribute(value) == *netdev;
                });
            }
        }),
        _ => {}
    });
    hooked.then(|| format!("nftables {} {table} {name}", form.what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(devices: &[&[u8]]) -> Vec<u8> {
        let list = devices
            .iter()
            .fold(Raw::default(), |list, name| list.with(DEVICE_NAME, name));
        let hook = Raw::default()
            .with(1, &0_u32.to_be_bytes())
            .with(2, &0_u32.to_be_bytes())
            .nest(CHAIN.devices, &list);
        let chain = Raw::default()
            .with(TABLE, b"fw\0")
            .with(CHAIN.name, b"in\0")
            .nest(CHAIN.hook, &hook);
        chain.as_bytes().to_vec()
    }

    #[test]
    fn a_chain_is_on_each_netdev_it_names_and_on_no_other() {
        let message = chain(&[b"eth1\0", b"eth\xff\0"]);
        for name in [Name::from("eth1"), Name::from(b"eth\xff".as_slice())] {
            let found = parse(&CHAIN, &message, &name).unwrap();
            assert_eq!(found, "nftables chain fw in");
        }
        for name in ["eth", "eth10", ""] {
            assert_eq!(parse(&CHAIN, &message, &Name::from(name)), None, "{name}");
        }
        // One that is hooked to no netdev, and what is cut off.
        assert_eq!(parse(&CHAIN, &chain(&[]), &Name::from("eth1")), None);
        for length in 0..message.len() {
            let _ = parse(&CHAIN, &message[..length], &Name::from("eth1"));
        }
    }
}
