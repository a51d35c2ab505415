//! What happens to the Node objects of a cluster.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{ApiServer, Patch};

const NODES: &str = "/api/v1/nodes";

impl ApiServer {
    /// Adds a Node of this name, as a kubelet does at its first registration, and returns its UID.
    ///
    /// # Errors
    /// The server refuses it: the name is taken or no name of a node.
    pub fn add_node(&self, name: &str) -> Result<String> {
        let node = json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        });
        uid_of(&self.client().post(NODES, &node)?.expect_success()?)
    }

    /// Deletes a Node, as an administrator or a cloud's controller does.
    ///
    /// # Errors
    /// There is none.
    pub fn delete_node(&self, name: &str) -> Result<()> {
        self.client()
            .delete(&format!("{NODES}/{name}"))?
            .expect_success()?;
        Ok(())
    }

    /// What a Node's kubelet reports: whether it is ready.
    ///
    /// # Errors
    /// There is no such Node.
    pub fn report_node(&self, name: &str, ready: bool) -> Result<()> {
        let status = json!({"status": {
            "conditions": [{"type": "Ready", "status": if ready { "True" } else { "Unknown" }}],
        }});
        let path = format!("{NODES}/{name}/status");
        self.client()
            .patch(&path, Patch::Merge, &status)?
            .expect_success()?;
        Ok(())
    }

    /// A Node's UID, or nothing if there is no such Node.
    ///
    /// # Errors
    /// The server does not answer.
    pub fn node_uid(&self, name: &str) -> Result<Option<String>> {
        let answer = self.client().get(&format!("{NODES}/{name}"))?;
        if answer.status == 404 {
            return Ok(None);
        }
        uid_of(&answer.expect_success()?).map(Some)
    }
}

fn uid_of(node: &Value) -> Result<String> {
    let uid = node["metadata"]["uid"].as_str();
    Ok(uid.context("a Node without UID")?.to_owned())
}
