//! The JSON form of parts of the inventory, where the plain form would not be read by people:
//! numbers that everybody writes in hexadecimal, pairs as objects.
//!
//! Keys are camelCase. The functions take references to the whole field, as serde hands it over.

use std::fmt::Display;

use serde::{Serialize, Serializer};

type Result<S> = std::result::Result<<S as Serializer>::Ok, <S as Serializer>::Error>;

/// A type by its text form.
pub(crate) fn text<T: Display, S: Serializer>(value: &T, serializer: S) -> Result<S> {
    serializer.collect_str(value)
}

/// `0x15b3`.
pub(crate) fn hex16<S: Serializer>(value: &u16, serializer: S) -> Result<S> {
    serializer.collect_str(&format_args!("{value:#06x}"))
}

/// `0x020000`.
pub(crate) fn hex24<S: Serializer>(value: &u32, serializer: S) -> Result<S> {
    serializer.collect_str(&format_args!("{value:#08x}"))
}

/// `0x8001` or null.
pub(crate) fn optional_hex16<S: Serializer>(value: &Option<u16>, serializer: S) -> Result<S> {
    value
        .map(|value| format!("{value:#06x}"))
        .serialize(serializer)
}

/// `"0x15b3:0x0041"` or null.
pub(crate) fn subsystem<S: Serializer>(value: &Option<(u16, u16)>, serializer: S) -> Result<S> {
    value
        .map(|(vendor, device)| format!("{vendor:#06x}:{device:#06x}"))
        .serialize(serializer)
}

/// `[{"index": 0, "key": "0xffff"}]`.
pub(crate) fn pkeys<S: Serializer>(pkeys: &[(u32, u16)], serializer: S) -> Result<S> {
    #[derive(Serialize)]
    struct Pkey {
        index: u32,
        #[serde(serialize_with = "hex16")]
        key: u16,
    }
    serializer.collect_seq(pkeys.iter().map(|&(index, key)| Pkey { index, key }))
}

/// `[{"port": 1, "name": "umad0", ...}]`.
pub(crate) fn nodes_of_ports<T: Serialize, S: Serializer>(
    nodes: &[(u32, T)],
    serializer: S,
) -> Result<S> {
    #[derive(Serialize)]
    struct Node<'a, T> {
        port: u32,
        #[serde(flatten)]
        device: &'a T,
    }
    serializer.collect_seq(nodes.iter().map(|(port, device)| Node {
        port: *port,
        device,
    }))
}

/// `[{"index": 0, "address": "0000:3b:08.2"}]`.
pub(crate) fn functions<T: Serialize, S: Serializer>(
    functions: &[(u32, T)],
    serializer: S,
) -> Result<S> {
    #[derive(Serialize)]
    struct Function<'a, T> {
        index: u32,
        address: &'a T,
    }
    serializer.collect_seq(functions.iter().map(|(index, address)| Function {
        index: *index,
        address,
    }))
}
