//! The last good configuration, kept on the node: a wrong file must not take a node out.
//!
//! The daemon keeps the configuration that it has in force when the file is changed for a wrong one.
//! This keeps it over a restart of the daemon or the node as well. What is kept is the text, so that
//! a newer program reads it by its own rules.

use std::path::{Path, PathBuf};

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

/// Where the last good configuration is kept; nowhere without a state directory.
#[derive(Debug, Clone)]
pub(crate) struct Kept(Option<PathBuf>);

impl Kept {
    /// Below this state directory.
    pub(crate) fn in_directory(state_dir: Option<&Path>) -> Self {
        Self(state_dir.map(|directory| directory.join(FILE)))
    }

    /// The configuration to start with: that of the file, or if that is wrong, the last good one.
    ///
    /// # Errors
    /// The file is wrong, and no good one is kept.
    pub(crate) fn start(&self, file: &Path, defaults: &Defaults) -> anyhow::Result<Start> {
        let read = config::text(file)
            .and_then(|text| config::check(file, &text, defaults).map(|config| (text, config)));
        let error = match read {
            Ok((text, config)) => {
                return Ok(Start {
                    config,
                    keep: Some(text),
                    error: None,
                });
            }
            Err(error) => error,
        };
        match self.read(defaults) {
            Some(config) => Ok(Start {
                config,
                keep: None,
                error: Some(error.to_string()),
            }),
            None => Err(error),
        }
    }

    fn read(&self, defaults: &Defaults) -> Option<Config> {
        config::load(self.0.as_deref()?, defaults).ok()
    }
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
        let kept = Kept::in_directory(Some(dir.path()));
        let start = |text: &str| {
            std::fs::write(&file, text).unwrap();
            kept.start(&file, &Defaults::default())
        };
        let resource = |start: &Start| start.config.pools[0].resource.to_string();
        // Without a good one, a wrong file is an error.
        start("{").unwrap_err();
        let error = start(PARTLY).unwrap_err().to_string();
        assert!(error.contains("configList[1]"), "{error}");
        let good = start(GOOD).unwrap();
        assert_eq!(good.error, None);
        std::fs::write(kept.0.as_ref().unwrap(), good.keep.unwrap()).unwrap();
        for wrong in ["{", PARTLY, "version: 1\npools: []\n"] {
            let start = start(wrong).unwrap();
            assert_eq!(resource(&start), "rdma/a", "{wrong}");
            assert!(start.error.is_some() && start.keep.is_none(), "{wrong}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(kept.start(&file, &Defaults::default()).is_ok());
        // Nothing is kept where no directory is given.
        let nowhere = Kept::in_directory(None);
        nowhere.start(&file, &Defaults::default()).unwrap_err();
    }
}
