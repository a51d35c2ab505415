//! The API's objects, by `kubectl`.

use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, bail};
use cni_wire::text::printable;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::documents::name_of;
use crate::global::Kubectl;
use crate::output::complain;

/// Resources, as `kubectl get` names them.
pub(super) const BLOCKS: &str = "addressblocks.rdma-netdev.io";
pub(super) const SPACES: &str = "addressspaces.rdma-netdev.io";
pub(super) const NODES: &str = "nodes";

/// kubectl gives up by itself after this.
const REQUEST_TIMEOUT: &str = "--request-timeout=30s";

#[derive(Deserialize)]
struct List {
    items: Vec<Value>,
}

impl Kubectl {
    /// All objects of a resource. One that cannot be read was written by hand or by a newer version:
    /// the others are listed without it.
    ///
    /// # Errors
    /// What kubectl printed, or that it printed something else than a list.
    pub(super) fn list<T: DeserializeOwned>(&self, resource: &str) -> anyhow::Result<Vec<T>> {
        let output = self.call(&["get", resource, "--output=json"])?;
        let list: List = read(resource, output)?;
        let readable = |item: Value| {
            let name = name_of(&item).to_owned();
            T::deserialize(item)
                .inspect_err(|error| complain(&format!("{resource} {name} is not read: {error}")))
                .ok()
        };
        Ok(list.items.into_iter().filter_map(readable).collect())
    }

    /// One object, if it is there.
    ///
    /// # Errors
    /// As [`Kubectl::list`].
    pub(super) fn get<T: DeserializeOwned>(
        &self,
        resource: &str,
        name: &str,
    ) -> anyhow::Result<Option<T>> {
        let arguments = ["get", resource, name, "--ignore-not-found", "--output=json"];
        let output = self.call(&arguments)?;
        match output.status.success() && output.stdout.is_empty() {
            true => Ok(None),
            false => read(resource, output).map(Some),
        }
    }

    /// Changes an object by a merge patch; `None` if it was changed since it was read. The patch has
    /// the object's `metadata.resourceVersion`.
    ///
    /// # Errors
    /// As [`Kubectl::list`].
    pub(super) fn patch<T: DeserializeOwned>(
        &self,
        resource: &str,
        name: &str,
        patch: &Value,
    ) -> anyhow::Result<Option<T>> {
        let patch = format!("--patch={patch}");
        let output = self.call(&[
            "patch",
            resource,
            name,
            "--type=merge",
            &patch,
            "--output=json",
        ])?;
        let refused = String::from_utf8_lossy(&output.stderr);
        if !output.status.success()
            && (refused.contains("(Conflict)") || refused.contains("(NotFound)"))
        {
            return Ok(None);
        }
        read(resource, output).map(Some)
    }

    fn call(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        Command::new(&self.kubectl)
            .args(self.arguments())
            .arg(REQUEST_TIMEOUT)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("start {}", self.kubectl))
    }
}

fn read<T: DeserializeOwned>(resource: &str, output: Output) -> anyhow::Result<T> {
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let last = text.lines().rfind(|line| !line.trim().is_empty());
        bail!(
            "kubectl: {resource}: {}",
            printable(last.unwrap_or("it printed nothing"))
        );
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("read what kubectl printed of {resource}"))
}
