//! Routing rules.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Parseable};
use netlink_packet_route::{
    AddressFamily,
    rule::{RuleAttribute, RuleMessage},
};

use super::{Result, Socket, socket::on_errno};

const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_GETRULE: u16 = 34;

/// All rules of a family, or of every family for `Unspec`; none where the kernel has no such family,
/// or no rules. One that cannot be read whole, as with a name that is not text, is left out: without what
/// is missing it would be another rule.
pub fn list(socket: &mut Socket, family: AddressFamily) -> Result<Vec<RuleMessage>> {
    let mut filter = RuleMessage::default();
    filter.header.family = family;
    let parse = |payload: &[u8]| Ok(RuleMessage::parse(payload).ok());
    let listed = socket.dump("list routing rules", RTM_GETRULE, &filter, parse);
    on_errno(listed, &[libc::EAFNOSUPPORT, libc::EOPNOTSUPP], Vec::new())
}

/// Adds a rule; one that is there is added.
pub fn add(socket: &mut Socket, what: &str, rule: &RuleMessage) -> Result<()> {
    let added = socket.request(what, RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, rule);
    on_errno(added, &[libc::EEXIST], ())
}

/// Removes a rule; one that is not there is removed.
pub fn delete(socket: &mut Socket, what: &str, rule: &RuleMessage) -> Result<()> {
    let deleted = socket.request(what, RTM_DELRULE, 0, rule);
    on_errno(deleted, &[libc::ENOENT], ())
}

/// The table a rule looks up.
pub fn table_of(rule: &RuleMessage) -> u32 {
    let table = rule.attributes.iter().find_map(|a| match a {
        RuleAttribute::Table(table) => Some(*table),
        _ => None,
    });
    table.unwrap_or(rule.header.table.into())
}
