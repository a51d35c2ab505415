//! The bindings of this node, what the CNI plugin's journal has, and whether CDI files can be written.

use std::path::Path;

use attachment::cdi_file::CdiDirectory;
use attachment::journal;
use attachment::part::Part;

use super::evidence::Attached;
use super::store::BindingDirectory;
use crate::node_paths::NodePaths;

impl NodePaths {
    /// The bindings.
    pub(crate) fn store(&self) -> BindingDirectory {
        BindingDirectory::at(&self.run_dir)
    }

    /// What the CNI plugin's journal has.
    ///
    /// # Errors
    /// The journal cannot be listed.
    pub(crate) fn attached(&self) -> Result<Attached, String> {
        let (records, unreadable) = journal::Journal::at(&self.state_dir())
            .records()
            .map_err(|error| error.to_string())?;
        let unreadable = unreadable
            .into_iter()
            .map(|(id, _)| id.container_id.to_string())
            .collect();
        let slots = records.into_iter().flat_map(|(_, record)| {
            let sandbox = record.container_id;
            // A NIC that a record has is in use, by whatever unit it got there.
            let hcas = record.parts.iter().flat_map(Part::hcas);
            let hcas: Vec<String> = hcas.map(str::to_owned).collect();
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
