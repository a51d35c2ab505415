//! What an administrator should know: said once in the log for as long as it stays true.

use tracing::Level;

/// A remark and how much it matters.
pub(crate) type Remark = (Level, String);

/// What was said already.
#[derive(Debug, Default)]
pub(crate) struct Said(Vec<Remark>);

impl Said {
    /// Logs what is true now and was not before.
    pub(crate) fn say(&mut self, now: Vec<Remark>) {
        for new in now.iter().filter(|one| !self.0.contains(one)) {
            let text = &new.1;
            match new.0 {
                Level::ERROR => tracing::error!("{text}"),
                Level::WARN => tracing::warn!("{text}"),
                _ => tracing::info!("{text}"),
            }
        }
        self.0 = now;
    }
}
