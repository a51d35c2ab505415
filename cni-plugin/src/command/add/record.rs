//! The journal's record of an ADD.

use attachment::{
    addresses,
    journal::{
        Part, Record,
        record::{Netns, VERSION},
    },
    node::now,
};
use cni_wire::Code;
use netlink::link::Link;

use super::{Add, Nic};
use crate::{error::Error, plan};

impl Add<'_> {
    /// A record of the attachment with these parts. The IPAM is in it before it leases anything: a DEL
    /// that finds a record releases by that alone.
    pub(super) fn record_of(&self, parts: Vec<Part>) -> Result<Record, Error> {
        let netns = self.pod.id();
        let args = &self.request.env.args;
        let pod = (args.get("K8S_POD_NAMESPACE"), args.get("K8S_POD_NAME"));
        Ok(Record {
            version: VERSION,
            network: self.request.config.name.clone(),
            container_id: self.id.container_id.to_string(),
            ifname: self.id.ifname.to_string(),
            pod: match pod {
                (Some(namespace), Some(name)) => Some(format!("{namespace}/{name}")),
                _ => None,
            },
            created: now(),
            boot: self.node.boot.clone(),
            netns: Netns {
                path: self.pod.path().display().to_string(),
                device: netns.device,
                inode: netns.inode,
            },
            parts,
            ipam: addresses::note(self.request)?,
        })
    }

    /// Puts a record into the journal. One that cannot take another's place is undone by what it says
    /// all the same.
    pub(super) fn write_down(&mut self, record: Record) -> Result<(), Error> {
        if self.record.is_none() {
            self.node.journal.create(self.key, &record)?;
            self.record = Some(record);
            return Ok(());
        }
        let record = self.record.insert(record);
        self.node.journal.replace(self.key, record)
    }

    /// Changes the parts of the record.
    pub(super) fn note(&mut self, change: impl FnOnce(&mut [Part])) -> Result<(), Error> {
        let Some(mut record) = self.record.clone() else {
            return Ok(());
        };
        change(&mut record.parts);
        match self.record.as_ref() == Some(&record) {
            true => Ok(()),
            false => self.write_down(record),
        }
    }

    /// Refuses IPoIB children without a carrier, unless the policy allows them. Then the record says
    /// so, for CHECK and status.
    pub(super) fn note_carriers(&mut self, nics: &[Nic]) -> Result<(), Error> {
        for (number, Nic { plan, link, .. }) in nics.iter().enumerate() {
            let is_used = plan
                .given
                .as_ref()
                .is_some_and(|given| !given.addresses.is_empty());
            let without = |link: &&Link| is_used && link.is_infiniband() && !link.carrier;
            let Some(link) = link.as_ref().filter(without) else {
                continue;
            };
            let why = match plan::has_partition(&plan.resolved, &plan.config) {
                Err(error) => error.msg.clone(),
                Ok(()) => {
                    "the port is not active, or the subnet manager has not made the broadcast \
                           group of its partition; ibstat shows the port"
                        .to_owned()
                }
            };
            let warning = format!("{} has no carrier: {why}", link.name);
            if plan.child.is_some() {
                if !self.node.policy.values.allow.inactive_partitions {
                    return Err(Error::new(Code::TryAgain, warning).with_details(format!(
                        "to start pods before the partition is active, set \
                         allow.inactivePartitions in {}",
                        self.node.policy.path.display()
                    )));
                }
                self.note(|parts| {
                    let mut children = parts
                        .iter_mut()
                        .skip(number)
                        .filter_map(|p| p.child.as_mut());
                    if let Some(child) = children.next() {
                        child.warning = Some(warning.clone());
                    }
                })?;
            }
            self.node.log.warn(format_args!("{}: {warning}", self.id));
        }
        Ok(())
    }
}
