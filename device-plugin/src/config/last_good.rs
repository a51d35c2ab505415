//! The last good configuration, kept on the node: a wrong file must not take a node out.
//!
//! The daemon keeps the configuration that it has in force when the file is changed for a wrong one.
//! This keeps it over a restart of the daemon or the node as well. What is kept is the text, so that
//! a newer program reads it by its own rules.

use std::path::{Path, PathBuf};

use super::{Config, Defaults, Error};
use node::file;

/// Name of the file in the state directory.
pub(crate) const FILE: &str = "device-plugin-config.last-good";

/// A configuration to start with.
#[derive(Debug)]
pub(crate) struct Start {
    /// It.
    pub config: Config,
    /// Why it is not that of the file, if so.
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

    /// Keeps a text that is in force in full. What cannot be written is a warning: the daemon can do
    /// without.
    pub(crate) fn keep(&self, text: &str) {
        let Some(path) = &self.0 else { return };
        if super::text(path).is_ok_and(|kept| kept == text) {
            return;
        }
        let put = match path.parent() {
            Some(directory) => std::fs::create_dir_all(directory),
            None => Ok(()),
        };
        if let Err(error) = put.and_then(|()| file::replace(path, text)) {
            tracing::warn!(
                file = %path.display(), %error,
                "cannot keep the configuration; should the file be wrong at the next start, the \
                 daemon has none; see --state-dir"
            );
        }
    }

    /// The configuration to start with: that of the file, or where that is wrong, wholly or in part,
    /// the last good one. A file that is wrong in part is served for the rest where there is no
    /// better one.
    ///
    /// # Errors
    /// The file is wrong as a whole, and no good one is kept.
    pub(crate) fn start(&self, file: &Path, defaults: &Defaults) -> Result<Start, Error> {
        let read = super::text(file)
            .and_then(|text| super::check(file, &text, defaults).map(|config| (text, config)));
        let (error, partial) = match read {
            Ok((text, config)) if config.refused.is_empty() => {
                self.keep(&text);
                return Ok(Start {
                    config,
                    error: None,
                });
            }
            Ok((_, config)) => (config.refused.join("; "), Ok(config)),
            Err(error) => (error.to_string(), Err(error)),
        };
        match self.read(defaults) {
            Some(config) => Ok(Start {
                config,
                error: Some(error),
            }),
            None => partial.map(|config| Start {
                config,
                error: None,
            }),
        }
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
        let (file, state) = (dir.path().join("config"), dir.path().join("state"));
        let kept = Kept::in_directory(Some(&state));
        let start = |text: &str| {
            std::fs::write(&file, text).unwrap();
            kept.start(&file, &Defaults::default())
        };
        let resource = |start: &Start| start.config.pools[0].resource.to_string();
        // Without a good one, a wrong file is an error, and one that is wrong in part is served.
        start("{").unwrap_err();
        let partly = start(PARTLY).unwrap();
        assert_eq!((resource(&partly), &partly.error), ("rdma/b".into(), &None));
        // It was not kept.
        start("{").unwrap_err();
        assert_eq!(start(GOOD).unwrap().error, None);
        for wrong in ["{", PARTLY, "version: 1\npools: []\n"] {
            let start = start(wrong).unwrap();
            assert_eq!(resource(&start), "rdma/a", "{wrong}");
            assert!(start.error.is_some(), "{wrong}");
        }
        std::fs::remove_file(&file).unwrap();
        assert!(kept.start(&file, &Defaults::default()).is_ok());
        // Nothing is kept where no directory is given.
        let nowhere = Kept::in_directory(None);
        nowhere.keep(GOOD);
        nowhere.start(&file, &Defaults::default()).unwrap_err();
    }
}
