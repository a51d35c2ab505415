//! CDI files of slots: put in place and removed. [`pools::deliver::slot`] has their texts.

use std::path::Path;

use attachment::cdi_file::{CdiDirectory, CdiError, PREFIX};
use pools::binding::record::Binding;
use pools::deliver::slot::{file_name, prefix};

/// Puts a slot's file in place, after those of other sandboxes are gone: a container runtime refuses
/// a device that two files name.
///
/// # Errors
/// [`CdiError`]: the file of this sandbox is as it was, or there is none.
pub(super) fn write(
    directory: &CdiDirectory,
    binding: &Binding,
    text: &str,
) -> Result<String, CdiError> {
    let (name, prefix) = (file_name(binding), prefix(&binding.unit));
    for other in directory.names(PREFIX)? {
        if other.starts_with(&prefix) && other != name {
            directory.remove(&other)?;
        }
    }
    if directory.read(&name)?.as_deref() != Some(text.as_bytes()) {
        directory.write(&name, text)?;
    }
    Ok(name)
}

/// Removes the CDI file of a binding.
///
/// # Errors
/// [`CdiError`]. A directory that is not there has no file.
pub(super) fn remove_file(directory: &Path, binding: &Binding) -> Result<(), CdiError> {
    match CdiDirectory::open(directory) {
        Ok(directory) => directory.remove(&file_name(binding)),
        // Emptied by a reboot, or never made.
        Err(error) if error.is_missing() => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use node_wire::Pod;

    use super::*;

    #[test]
    fn a_new_sandbox_has_the_only_file_of_its_slot() {
        let dir = tempfile::tempdir().unwrap();
        let directory = CdiDirectory::open(dir.path()).unwrap();
        let pod = Pod {
            namespace: "ml".into(),
            name: "a".into(),
            uid: None,
        };
        let binding = |slot, sandbox| {
            let hca = "0000:3b:00.0".parse().unwrap();
            Binding::new(&hca, slot, &pod, Some(sandbox))
        };
        let (one, ten) = ("slot_3e71787e_1", binding("slot_3e71787e_10", "s1"));
        write(&directory, &ten, "{}").unwrap();
        let old = write(&directory, &binding(one, "s1"), "{}").unwrap();
        let new = write(&directory, &binding(one, "s2"), "{}").unwrap();
        assert_ne!(old, new);
        let mut names = directory.names(PREFIX).unwrap();
        names.sort();
        assert_eq!(names, [new.clone(), file_name(&ten)]);
        // The old sandbox's DEL comes late.
        directory.remove(&old).unwrap();
        assert!(directory.read(&new).unwrap().is_some());
    }
}
