//! Where bindings, CDI files, the CNI plugin's journal and the kubelet's checkpoint are.

use std::path::{Path, PathBuf};

use attachment::cdi_file::CdiDirectory;
use attachment::journal;
use hca::Host;
use node::policy::Policy;

use super::evidence::Attached;
use super::store::Store;

/// Where things are.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    /// Roots of the host's kernel file systems.
    pub host: Host,
    /// The node's policy, which names the state directory.
    pub policy: PathBuf,
    /// The directory of the node's sockets, which ends with the boot.
    pub run_dir: PathBuf,
    /// Where CDI files go.
    pub cdi_dir: PathBuf,
    /// The kubelet's device-plugins directory, which has its checkpoint.
    pub device_plugin_dir: PathBuf,
}

impl Places {
    /// The bindings.
    pub(crate) fn store(&self) -> Store {
        Store::at(&self.run_dir)
    }

    /// What the CNI plugin's journal has, in every state directory that the policy names or named.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub(crate) fn attached(&self) -> Result<Attached, String> {
        hca::host::show(&self.policy);
        let state_dir = Policy::load_for_release(&self.policy).0.state_dir;
        let (records, unreadable) = journal::Store::records_of_node(&self.policy, &state_dir)
            .map_err(|error| error.to_string())?;
        let unreadable = unreadable
            .into_iter()
            .map(|one| one.id.container_id.to_string())
            .collect();
        let slots = records.into_iter().flat_map(|(_, record)| {
            let sandbox = record.container_id;
            let parts = record.parts.into_iter();
            // A NIC that a record has is in use, by whatever unit it got there.
            let hcas = parts.flat_map(|part| {
                let slots = part.slots.into_iter().map(|slot| slot.hca);
                slots.chain(part.hcas)
            });
            let hcas: Vec<String> = hcas.collect();
            hcas.into_iter().map(move |hca| (sandbox.clone(), hca))
        });
        Ok(Attached {
            slots: slots.collect(),
            unreadable,
        })
    }
}

/// Whether a CDI directory can have files of slots: why not, if it cannot.
pub(crate) fn directory_obstacle(path: &Path) -> Option<String> {
    let opened = CdiDirectory::create(path).err()?;
    Some(format!(
        "{opened}; mount the host's CDI directory there, or name it with --cdi-dir"
    ))
}
