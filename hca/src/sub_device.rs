//! RDMA devices for management alone, which stand on the function of the device that they serve.
//!
//! A multi-plane HCA (ConnectX-8 on XDR) has one, `smi1`, with a port for the subnet manager's packets of
//! each plane. It has no verbs node. Netlink tells it by its type and its parent since Linux 6.11; sysfs
//! shows no difference.

use std::collections::BTreeSet;
use std::io;

use netlink_packet_core::{
    Emitable, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader,
    NlasIterator,
};
use netlink_sys::protocols::NETLINK_RDMA;

use crate::kernel_socket::KernelSocket;
use crate::unit::is_number;

// `include/uapi/rdma/rdma_netlink.h`.
const GET_DEVICES: u16 = 5 << 10 | 1;
const DEV_NAME: u16 = 2;
const DEV_TYPE: u16 = 99;
const PARENT_NAME: u16 = 100;

/// Those of these RDMA devices, which stand on one piece of hardware, that are for management alone. The
/// kernel is asked only if there are several, and a name decides where it does not say.
pub(crate) fn among<'n>(names: impl Iterator<Item = &'n str> + Clone) -> BTreeSet<String> {
    let all = names.clone().count();
    if all < 2 {
        return BTreeSet::new();
    }
    let typed = typed().unwrap_or_default();
    let is_named = |name: &str| name.strip_prefix("smi").is_some_and(is_number);
    let found = names.filter(|name| typed.contains(*name) || is_named(name));
    let found: BTreeSet<String> = found.map(str::to_owned).collect();
    match found.len() == all {
        true => BTreeSet::new(),
        false => found,
    }
}

/// Names of the RDMA devices of this network namespace that have a type or a parent.
fn typed() -> io::Result<BTreeSet<String>> {
    let socket = KernelSocket::open(NETLINK_RDMA, 0)?;
    let mut header = NetlinkHeader::default();
    header.message_type = GET_DEVICES;
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    header.length = 16;
    let mut request = [0; 16];
    header.emit(&mut request);
    socket.send(&request, 0)?;
    let (mut found, mut buffer) = (BTreeSet::new(), Vec::new());
    loop {
        socket.receive(&mut buffer)?;
        let mut rest = buffer.as_slice();
        while let Ok(message) = NetlinkBuffer::new_checked(rest) {
            if [NLMSG_DONE, NLMSG_ERROR].contains(&message.message_type()) {
                return Ok(found);
            }
            found.extend(typed_name(message.payload()));
            let length = usize::try_from(message.length()).unwrap_or(usize::MAX);
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// The name in a device's attributes, if it has a type or a parent.
fn typed_name(attributes: &[u8]) -> Option<String> {
    let (mut name, mut is_typed) = (None, false);
    for attribute in NlasIterator::new(attributes).map_while(Result::ok) {
        match attribute.kind() {
            DEV_NAME => name = String::from_utf8(attribute.value().to_vec()).ok(),
            DEV_TYPE | PARENT_NAME => is_typed = true,
            _ => {}
        }
    }
    let name = name.filter(|_| is_typed)?;
    Some(name.trim_end_matches('\0').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute_bytes(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn a_device_with_a_type_or_a_parent_is_a_sub_device() {
        let name = attribute_bytes(DEV_NAME, b"plane0\0");
        let plain = [attribute_bytes(1, &7_u32.to_ne_bytes()), name.clone()].concat();
        assert_eq!(typed_name(&plain), None);
        let typed = [name.clone(), attribute_bytes(DEV_TYPE, &[1])].concat();
        assert_eq!(typed_name(&typed).as_deref(), Some("plane0"));
        let child = [attribute_bytes(PARENT_NAME, b"mlx5_0\0"), name].concat();
        assert_eq!(typed_name(&child).as_deref(), Some("plane0"));
        for cut in 0..child.len() {
            typed_name(&child[..cut]);
            let _ = NetlinkBuffer::new_checked(&child[..cut]);
        }
    }

    #[test]
    fn a_name_decides_where_the_kernel_says_nothing() {
        let of = |names: &[&str]| among(names.iter().copied()).into_iter().collect::<Vec<_>>();
        assert_eq!(of(&["mlx5_0", "smi1"]), ["smi1"]);
        assert_eq!(of(&["mlx5_0", "mlx5_1", "smith1"]), [""; 0]);
        assert_eq!(of(&["smi1"]), [""; 0], "it stands alone");
        assert_eq!(of(&["smi1", "smi2"]), [""; 0], "one of them carries data");
    }
}
