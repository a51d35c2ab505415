//! What was seen of an HCA before a pod took it, or a part of it, to its own namespace.
//!
//! Selectors ask for netdev names, port rates and the like, which the host cannot see while a pod
//! has them. An HCA must not fall out of its pool for that.

use std::collections::BTreeMap;

use hca::unit::HcaId;

use super::{Candidate, LinkType, Netdev};

/// HCAs as they were when last seen whole.
#[derive(Debug, Clone, Default)]
pub(crate) struct Memory {
    known: BTreeMap<HcaId, Candidate>,
    /// Netdevs that attachments took away, by identity, as the CNI plugin's journal names them.
    taken: BTreeMap<HcaId, Vec<Netdev>>,
}

impl Memory {
    /// Takes note of netdevs that are in pods, from a record that outlives this process.
    pub(crate) fn note_taken(
        &mut self,
        taken: impl IntoIterator<Item = (HcaId, String, LinkType)>,
    ) {
        self.taken.clear();
        for (id, name, link_type) in taken {
            self.taken
                .entry(id)
                .or_default()
                .push(Netdev { name, link_type });
        }
    }

    /// Fills what candidates lack from what was known of them, and remembers what is seen now.
    pub(crate) fn complete(&mut self, candidates: &mut [Candidate]) {
        for candidate in candidates {
            if let Some(known) = self.known.get(&candidate.id) {
                if candidate.elsewhere || candidate.fault.is_some() {
                    *candidate = Candidate {
                        elsewhere: candidate.elsewhere,
                        fault: candidate.fault.take(),
                        ..known.clone()
                    };
                } else if candidate.netdevs.is_empty() {
                    candidate.netdevs.clone_from(&known.netdevs);
                }
            }
            if candidate.netdevs.is_empty()
                && let Some(taken) = self.taken.get(&candidate.id)
            {
                candidate.netdevs.clone_from(taken);
            }
            if !candidate.elsewhere && candidate.fault.is_none() {
                self.known.insert(candidate.id.clone(), candidate.clone());
            }
        }
    }
}
