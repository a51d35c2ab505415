//! The last good configuration, kept on the node: a wrong file must not take a node out.
//!
//! The daemon keeps the configuration that it has in force when the file is changed for a wrong one.
//! This keeps it over a restart of the daemon or the node as well. What is kept is the text, so that
//! a newer program reads it by its own rules.

use std::path::{Path, PathBuf};

use super::{Config, Defaults};

/// Name of the file in the state directory.
pub(crate) const FILE: &str = "device-plugin-config.last-good";

/// A configuration to start with.
#[derive(Debug)]
pub(crate) struct Start {
    /// It.
    pub config: Config,
    /// The text to keep; none where what is kept already is better.
    pub keep: Option<String>,
    /// Why it is not that of the file, or not of all of it, if so.
    pub error: Option<String>,
}

/// Where the last good configuration is kept; nowhere without a state directory.
#[derive(Debug, Clone)]
pub(crate) struct Kept(Option<PathBuf>);

impl Kept {
    /// Below this state directory.
    pub(crate) fn in_directory(state_dir: Option<&Path>) -> Self {
        Self(state_dir.map(|directory| directory.join(FILE)))
    }

    /// The file, where there is one.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.0.as_deref()
    }

    /// The configuration to start with: that of the file, or where that is wrong, wholly or in part,
    /// the last good one. A file that is wrong in part is served for the rest where there is no
    /// better one.
    ///
    /// # Errors
    /// The file is wrong as a whole, and no good one is kept.
    pub(crate) fn start(&self, file: &Path, defaults: &Defaults) -> anyhow::Result<Start> {
        let read = super::text(file)
            .and_then(|text| super::check(file, &text, defaults).map(|config| (text, config)));
        let (error, partial) = match read {
            Ok((text, config)) if config.refused.is_empty() => {
                return Ok(Start {
                    config,
                    keep: Some(text),
                    error: None,
                });
            }
            Ok((_, config)) => (config.refused.join("; "), Ok(config)),
            Err(error) => (error.to_string(), Err(error)),
        };
        let config = match self.read(defaults) {
            Some(config) => config,
            None => partial?,
        };
        Ok(Start {
            config,
            keep: None,
            error: Some(error),
        })
    }

    fn read(&self, defaults: &Defaults) -> Option<Config> {
        let config = super::load(self.0.as_deref()?, defaults).ok()?;
        config.refused.is_empty().then_some(config)
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
        // Without a good one, a wrong file is an error, and one that is wrong in part is served.
        start("{").unwrap_err();
        let partly = start(PARTLY).unwrap();
        assert_eq!((resource(&partly), &partly.keep), ("rdma/b".into(), &None));
        let error = partly.error.unwrap();
        assert!(error.contains("configList[1]"), "{error}");
        let good = start(GOOD).unwrap();
        assert_eq!(good.error, None);
        std::fs::write(kept.path().unwrap(), good.keep.unwrap()).unwrap();
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
