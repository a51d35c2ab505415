//! The last good configuration, kept on the node: a wrong file must not take a node out.
//!
//! The daemon keeps the configuration that it has in force when the file is changed for a wrong one.
//! This keeps it over a restart of the daemon or the node as well. What is kept is the text, so that
//! a newer program reads it by its own rules.

use std::path::Path;

use node_wire::status::ConfigurationStatus;
use pools::config::{self, Config, Defaults};

/// What a wrong file means while the daemon runs.
pub(crate) const REJECTED: &str =
    "config rejected, still running on the last good one; fix the file, no restart needed";

/// Name of the file in the state directory.
pub(crate) const FILE: &str = "device-plugin-config.last-good";

/// A configuration to start with.
#[derive(Debug)]
pub(crate) struct Start {
    /// It.
    pub config: Config,
    /// The text to keep; none where what is kept already is better.
    pub keep: Option<String>,
    /// Why it is not that of the file, if so.
    pub error: Option<String>,
}

impl Start {
    /// Where the configuration stands, for people.
    pub(crate) fn status(&self, file: &Path) -> ConfigurationStatus {
        ConfigurationStatus {
            file: file.to_owned(),
            format: self.config.format.to_string(),
            generation: 1,
            error: self.error.clone(),
        }
    }
}

/// The configuration to start with: that of the file, or if that is wrong, the last good one of the state
/// directory.
///
/// # Errors
/// The file is wrong, and no good one is kept.
pub(crate) fn start(
    file: &Path,
    defaults: &Defaults,
    state_dir: Option<&Path>,
) -> anyhow::Result<Start> {
    let read = config::text(file).and_then(|text| {
        let config = config::check(file, &text, defaults)?;
        Ok(Start {
            config,
            keep: Some(text),
            error: None,
        })
    });
    read.or_else(|error| {
        let kept =
            state_dir.and_then(|directory| config::load(&directory.join(FILE), defaults).ok());
        match kept {
            Some(config) => Ok(Start {
                config,
                keep: None,
                error: Some(error.to_string()),
            }),
            None => Err(error),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        "{\"configList\": [{\"resourceName\": \"a\", \"rdmaHcaMax\": 1, \"devices\": [\"x\"]}]}";
    const PARTLY: &str = "{\"configList\": [{\"resourceName\": \"b\", \"rdmaHcaMax\": 1, \"devices\": [\"x\"]}, {}]}";

    #[test]
    fn a_wrong_file_is_replaced_by_the_last_good_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config");
        let start = |text: &str| {
            std::fs::write(&file, text).unwrap();
            super::start(&file, &Defaults::default(), Some(dir.path()))
        };
        let resource = |start: &Start| start.config.pools[0].resource.to_string();
        // Without a good one, a wrong file is an error.
        start("{").unwrap_err();
        let error = start(PARTLY).unwrap_err().to_string();
        assert!(error.contains("configList[1]"), "{error}");
        let good = start(GOOD).unwrap();
        assert_eq!(good.error, None);
        std::fs::write(dir.path().join(FILE), good.keep.unwrap()).unwrap();
        for wrong in ["{", PARTLY, "version: 1\npools: []\n"] {
            let start = start(wrong).unwrap();
            assert_eq!(resource(&start), "rdma/a", "{wrong}");
            assert!(start.error.is_some() && start.keep.is_none(), "{wrong}");
        }
        std::fs::remove_file(&file).unwrap();
        let defaults = Defaults::default();
        assert!(super::start(&file, &defaults, Some(dir.path())).is_ok());
        // Nothing is kept where no directory is given.
        super::start(&file, &defaults, None).unwrap_err();
    }
}
