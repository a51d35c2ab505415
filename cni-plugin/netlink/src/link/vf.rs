//! Virtual functions, by what their physical function says of them.

use netlink_packet_core::Parseable;
use netlink_packet_route::link::{LinkAttribute, LinkExtentMask, LinkMessage, VfInfo};

use super::{RTM_GETLINK, RTM_SETLINK};
use crate::{Result, Socket};

/// What a PF says of one of its VFs; empty when it has none of that number.
///
/// # Errors
/// The kernel's refusal.
pub fn vf_properties(socket: &mut Socket, pf: u32, number: u32) -> Result<Vec<VfInfo>> {
    /// `RTEXT_FILTER_VF` and `RTEXT_FILTER_SKIP_STATS`
    const FILTER: [LinkExtentMask; 2] = [LinkExtentMask::Vf, LinkExtentMask::SkipStats];
    let mut message = LinkMessage::default();
    message.header.index = pf;
    message
        .attributes
        .push(LinkAttribute::ExtMask(FILTER.to_vec()));
    let mut properties = Vec::new();
    let what = format_args!("read VF {number} of netdev {pf}").to_string();
    socket.ask(what, RTM_GETLINK, 0, &message, |payload| {
        for attribute in LinkMessage::parse(payload)?.attributes {
            let LinkAttribute::VfInfoList(list) = attribute else {
                continue;
            };
            // Each names the VF it is of; its MAC address is always there.
            let of_vf = list.into_iter().find(|vf| {
                vf.0.iter()
                    .any(|p| matches!(p, VfInfo::Mac(mac) if mac.vf_id == number))
            });
            properties = of_vf.map(|vf| vf.0).unwrap_or_default();
        }
        Ok(())
    })?;
    Ok(properties)
}

/// Sets properties of a VF through its PF.
///
/// # Errors
/// The kernel's refusal.
pub fn set_vf(
    socket: &mut Socket,
    what: &str,
    pf: u32,
    properties: Vec<LinkAttribute>,
) -> Result<()> {
    let mut message = LinkMessage::default();
    message.header.index = pf;
    message.attributes = properties;
    socket.request(what, RTM_SETLINK, 0, &message)
}
