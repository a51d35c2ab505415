//! What this node's pods have of it, by the journal, for people and for `status`.

use std::collections::BTreeSet;
use std::path::Path;

use node::identity::is_other_boot;

use crate::{
    addresses,
    error::Error,
    journal::{Key, Record},
    node::Node,
    part::Part,
    reclaim::{Netns, netns},
};

/// One interface of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// `namespace/name`, where the runtime said it.
    pub pod: Option<String>,
    /// Name of the interface in the pod.
    pub interface: String,
    pub network: String,
    /// `CNI_CONTAINERID`, which its leases have too.
    pub container: String,
    /// `CNI_IFNAME`, which its leases have: another name than `interface` with `devices: all`.
    pub ifname: String,
    /// Which of the attachment's leases are this interface's, by their numbers; `None` for all.
    pub lease_numbers: Option<BTreeSet<usize>>,
    /// `move`, `macvlan`, …
    pub kind: Option<String>,
    /// The host's netdev: the moved one, or the child's master.
    pub netdev: Option<String>,
    /// The HCAs of a moved netdev, as units name them, and those that its slots are bound to.
    pub hcas: BTreeSet<String>,
    pub netns: String,
    /// `alive`, `gone` or `unknown`.
    pub netns_state: &'static str,
    /// Unix seconds of the ADD.
    pub created: u64,
    /// Why the interface may have no carrier, where the ADD knew that.
    pub warning: Option<String>,
}

impl Attachment {
    /// What a record says, one entry for each interface, and why it is not known which of them has
    /// which address.
    #[must_use]
    pub fn all_of(record: &Record, node: &Node) -> (Vec<Self>, Option<cni_wire::Error>) {
        let netns_state = fate(record, &node.roots.proc, &node.boot);
        let (positions, unknown) = match addresses::positions(node, record) {
            Ok(positions) => (positions, None),
            Err(error) => (Some(Vec::new()), Some(error)),
        };
        let of = |(interface, part): (usize, &Part)| {
            let numbers = positions.as_ref().map(|positions| {
                let own = positions.iter().enumerate();
                let own = own.filter(|(_, position)| **position == interface);
                own.map(|(number, _)| number).collect()
            });
            Self::of(record, part, netns_state, numbers)
        };
        let all = record.parts.iter().enumerate();
        (all.map(of).collect(), unknown)
    }

    fn of(
        record: &Record,
        part: &Part,
        netns_state: &'static str,
        lease_numbers: Option<BTreeSet<usize>>,
    ) -> Self {
        Self {
            pod: record.pod.clone(),
            interface: part.name().to_owned(),
            network: record.network.clone(),
            container: record.container_id.clone(),
            ifname: record.ifname.clone(),
            lease_numbers,
            kind: Some(part.attach().to_owned()),
            netdev: part.netdev(),
            hcas: part.hcas().map(str::to_owned).collect(),
            netns: record.netns.path.clone(),
            netns_state,
            created: record.created,
            warning: part.child().and_then(|child| child.warning.clone()),
        }
    }
}

/// What became of the attachment's namespace.
fn fate(record: &Record, proc: &Path, boot: &str) -> &'static str {
    if is_other_boot(&record.boot, boot) {
        return "gone";
    }
    match netns(&record.netns, proc) {
        Netns::Present => "alive",
        Netns::Gone => "gone",
        Netns::Unknown(_) => "unknown",
    }
}

/// Records, and what is to be said of those that cannot be used.
pub type Records = (Vec<(Key, Record)>, Vec<String>);

/// All attachments of a node whose record can be read, oldest first, and what is to be said of the
/// others.
pub fn records(node: &Node) -> Result<Records, Error> {
    let (mut records, unreadable) = node.journal.records()?;
    records.sort_by(|(_, a), (_, b)| (a.created, &a.network).cmp(&(b.created, &b.network)));
    let unreadable = unreadable.iter().map(|(_, error)| error.to_string());
    Ok((records, unreadable.collect()))
}
