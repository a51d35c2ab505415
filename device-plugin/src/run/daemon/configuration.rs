//! The configuration file: read again, watched, put in force.

use std::time::Duration;

use node::file::FileId;

use super::Daemon;
use crate::events::{Trigger, Triggers};
use crate::last_good::REJECTED;
use pools::config::{self, Config};

/// How long the kubelet may take to say who holds what, before a configuration is used.
const HOLDINGS_TIMEOUT: Duration = Duration::from_secs(2);

impl Daemon {
    /// Reads the configuration again. A wrong one changes nothing. True if another one is in force.
    pub(super) async fn reload(&mut self) -> bool {
        let file = self.settings.config_file.clone();
        let defaults = self.settings.defaults.clone();
        let read = self.config_file.reader.run(move || {
            hca::host::show(&file);
            let id = FileId::of(&file);
            let read = config::text(&file).and_then(|text| {
                let config = config::check(&file, &text, &defaults)?;
                Ok((text, config))
            });
            (id, read)
        });
        let Ok((id, read)) = read.await else {
            return false;
        };
        self.config_file.read = id;
        match read {
            Ok((_, config)) if config == self.config => self.config_file.state.error = None,
            Ok((text, config)) => {
                self.config_file.keep = Some(text);
                self.follow(config).await;
                return true;
            }
            Err(error) => {
                let error = error.to_string();
                if self.config_file.state.error.as_ref() != Some(&error) {
                    tracing::error!(error, "{REJECTED}");
                    self.config_file.state.error = Some(error);
                }
            }
        }
        false
    }

    /// Puts a configuration in force. Who holds what is asked first: an HCA that a pod has for itself
    /// must not be offered by another pool.
    async fn follow(&mut self, config: Config) {
        if let Ok(allocated) = self.outputs.pods.holdings_of_now(HOLDINGS_TIMEOUT).await {
            self.world.allocated = Some(allocated);
        }
        self.config_file.state.error = None;
        let old = std::mem::replace(&mut self.config, config);
        let pool = |config: &Config, name: &_| {
            config
                .pools
                .iter()
                .find(|pool| pool.resource == *name)
                .cloned()
        };
        let new = &self.config;
        self.history
            .keep_only(|name| pool(&old, name) == pool(new, name));
        self.sessions.follow(&self.config);
        self.config_file.state.format = self.config.format.to_string();
        self.config_file.state.generation += 1;
        self.log_configuration();
    }

    /// Who holds what is asked every now and then, and for each changed configuration: the newer answer
    /// counts, also if both say the same.
    pub(super) fn take_newest_allocated(&mut self) {
        let polled = self.inputs.held.borrow().clone();
        let known = [polled, self.world.allocated.take()].into_iter().flatten();
        self.world.allocated = known.max_by_key(|allocated| allocated.asked());
    }

    /// Watches the directory of the configuration file: a ConfigMap is replaced by a renamed link
    /// beside it.
    ///
    /// Returns whether the file is another one than was read: a directory that was replaced sends no
    /// event.
    pub(super) async fn watch_configuration(&mut self, triggers: &Triggers) -> bool {
        let file = self.settings.config_file.clone();
        let mut watch = std::mem::take(&mut self.config_file.watch);
        let triggers = triggers.clone();
        let watched = self.config_file.reader.run(move || {
            hca::host::show(&file);
            let wake = move || triggers.send(Trigger::Configuration);
            let unwatched = watch.renew(node::trust::parent(&file), wake);
            (FileId::of(&file), watch, unwatched)
        });
        let Ok((file_id, watch, unwatched)) = watched.await else {
            return false;
        };
        self.config_file.watch = watch;
        if let Some(error) = unwatched {
            tracing::warn!(
                file = %self.settings.config_file.display(), error,
                "cannot watch the configuration; it is read before each scan"
            );
        }
        file_id != self.config_file.read
    }

    pub(super) fn log_configuration(&self) {
        let (file, config) = (&self.settings.config_file, &self.config);
        tracing::info!(
            file = %file.display(), format = %config.format, pools = config.pools.len(),
            "configuration in force"
        );
        // The key of the plugins that this one replaces.
        let beside = file.with_file_name("config.json");
        if beside != *file && beside.is_file() {
            tracing::warn!(
                "configuration: {} is there and is not read, {} is; in a ConfigMap that is the key",
                beside.display(),
                file.display()
            );
        }
        for warning in &config.warnings {
            tracing::warn!("configuration: {warning}");
        }
    }
}
