//! `rdmactl addresses show`: everything known about an address, a pod or a container.

use super::{Scope, names_pod};
use crate::output::{Ended, Outcome, complain};
use clap::Args;
use cni_wire::text::printable;
use ipam::lease::Lease;
use ipam::store::Entry;
use serde_json::{Value, json};
use std::net::IpAddr;

/// The beginning of a container ID has at least so many bytes: a shorter one is as likely to be a
/// mistake.
const MIN_BEGINNING: usize = 4;

#[derive(Debug, Args)]
pub(super) struct Show {
    /// An address, a pod (namespace/name or name), a container ID, or at least 4 characters of
    /// its beginning
    what: String,
}

impl Show {
    pub(super) fn run(&self, scope: &Scope<'_>) -> Ended {
        let (_, store) = scope.open_used()?;
        let address: Option<IpAddr> = self.what.parse().ok();
        let mut found = Vec::new();
        if let (Some(store), Some(address)) = (&store, address) {
            found = store.entries_at(address)?.iter().map(describe).collect();
        } else if let Some(store) = store {
            store.entries(true, |entry| {
                if entry.record.as_ref().is_ok_and(|lease| self.means(lease)) {
                    found.push(describe(&entry));
                }
                Ok(())
            })?;
        }
        if found.is_empty() {
            let mut why = format!("nothing is known about {:?}", self.what);
            if self.what.len() < MIN_BEGINNING {
                why += &format!(
                    "; of a container ID at least {MIN_BEGINNING} characters are needed, or all of it"
                );
            }
            complain(&why);
            return Ok(Outcome::Found);
        }
        let text = || found.iter().map(|entry| text(entry) + "\n").collect();
        scope.global.say(json!({"found": found}), text);
        Ok(Outcome::Good)
    }

    fn means(&self, lease: &Lease) -> bool {
        names_pod(lease, &self.what)
            || lease.holder.container == self.what
            || (self.what.len() >= MIN_BEGINNING && lease.holder.container.starts_with(&self.what))
    }
}

fn describe(entry: &Entry) -> Value {
    let (state, key) = match entry.freed {
        Some(_) => ("freed", "lastLease"),
        None => ("held", "lease"),
    };
    let mut value = json!({
        "address": entry.address,
        "networkName": entry.network_name,
        "state": state,
        "timesLeased": entry.generation,
        "file": entry.path,
    });
    let (key, lease) = match &entry.record {
        Ok(lease) => (key, json!(lease)),
        Err(why) => ("fault", json!(why)),
    };
    if let Some(map) = value.as_object_mut() {
        if let Some(freed) = entry.freed {
            let at = i64::try_from(freed).ok();
            let at = at.and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
            map.insert("freed".into(), json!(at));
        }
        map.insert(key.into(), lease);
    }
    value
}

/// Key and value on a line each, what is inside an object indented.
fn text(value: &Value) -> String {
    fn lines(value: &Value, depth: usize, out: &mut String) {
        for (key, value) in value.as_object().into_iter().flatten() {
            let indent = "  ".repeat(depth);
            match value {
                Value::Object(_) => {
                    *out += &format!("{indent}{key}:\n");
                    lines(value, depth + 1, out);
                }
                Value::String(text) => *out += &format!("{indent}{key}: {}\n", printable(text)),
                other => *out += &format!("{indent}{key}: {other}\n"),
            }
        }
    }
    let mut out = String::new();
    lines(value, 0, &mut out);
    out
}
