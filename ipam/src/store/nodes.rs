//! Which nodes of the cluster use a store: what the broker of each says of itself.
//!
//! ```text
//! nodes/<name>   {"version": 1, "uid": "…", "machine": "…"}
//! ```
//! A lease names its node and machine, but that name need not be one of a Node object: a policy may
//! have any. So a node's own broker, which has read the Node object of its name, writes that
//! object's UID and the machine ID here. Only of such a node the cluster can say that it is gone.
//!
//! A node's file is written by its broker alone, of which one runs at a time: under another name,
//! synced and renamed. Killed in between, the next announcement takes the other name anew. Others
//! remove the file, after the leases: killed before that, they find the node once more, and free
//! what is left.

use super::dir::Found;
use super::{Store, StoreError};
use nix::errno::Errno;
use node::identity::is_name;
use serde::{Deserialize, Serialize};

const NODES: &str = "nodes";
const VERSION: u64 = 1;
/// Much longer than a UID and a machine ID.
const MAX_BYTES: u64 = 4096;

/// A node of the cluster that used the store.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct AnnouncedNode {
    /// Name of its Node object, and of the node in its leases.
    pub name: String,
    /// UID of that object.
    pub uid: String,
    /// The machine ID in its leases, not empty.
    pub machine: String,
}

#[derive(Serialize, Deserialize)]
struct Text {
    version: u64,
    uid: String,
    machine: String,
}

impl Store {
    /// Writes that this node is a Node object of the cluster, unless that is written. False of a
    /// machine without machine ID, whose leases cannot be told from those of another one of its name.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub fn announce_node(&self, uid: &str) -> Result<bool, StoreError> {
        let node = self.node();
        if node.machine.is_empty() {
            return Ok(false);
        }
        let announced = AnnouncedNode {
            name: node.name.clone(),
            uid: uid.to_owned(),
            machine: node.machine.clone(),
        };
        if self.announced_node(&node.name)?.as_ref() == Some(&announced) {
            return Ok(true);
        }
        let dir = self.make_below(&[NODES])?;
        let text = Text {
            version: VERSION,
            uid: announced.uid,
            machine: announced.machine,
        };
        // Strings and a number.
        let text = serde_json::to_vec(&text).unwrap_or_default();
        let draft = format!(".{}", node.name);
        dir.unlink(&draft)?;
        if dir.create(&draft, &text, true)?.is_none() || !dir.rename(&draft, &node.name)? {
            return Err(dir.failed("replace", &node.name)(Errno::EEXIST).into());
        }
        Ok(true)
    }

    /// The nodes of the cluster that used the store, by name. What is no such file is passed over.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn announced_nodes(&self) -> Result<Vec<AnnouncedNode>, StoreError> {
        let Some(dir) = self.open_below(&[NODES])? else {
            return Ok(Vec::new());
        };
        let mut names = dir.names_that(is_name)?;
        names.sort();
        let mut nodes = Vec::new();
        for name in names {
            nodes.extend(self.announced_node(&name)?);
        }
        Ok(nodes)
    }

    /// Removes what a node's broker wrote, unless it wrote something else since.
    ///
    /// # Errors
    /// When the store cannot be read or written.
    pub fn forget_node(&self, node: &AnnouncedNode) -> Result<(), StoreError> {
        if self.announced_node(&node.name)?.as_ref() == Some(node)
            && let Some(dir) = self.open_below(&[NODES])?
        {
            // Written anew meanwhile, it is written once more: brokers check theirs again and again.
            dir.unlink(&node.name)?;
        }
        Ok(())
    }

    fn announced_node(&self, name: &str) -> Result<Option<AnnouncedNode>, StoreError> {
        let Some(dir) = self.open_below(&[NODES])? else {
            return Ok(None);
        };
        let Some(Found::File(text, _)) = dir.read(name, MAX_BYTES)? else {
            return Ok(None);
        };
        let text: Option<Text> = serde_json::from_slice(&text).ok();
        let text = text.filter(|text| {
            text.version == VERSION && !text.uid.is_empty() && !text.machine.is_empty()
        });
        Ok(text.map(|text| AnnouncedNode {
            name: name.to_owned(),
            uid: text.uid,
            machine: text.machine,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node::identity::NodeIdentity;
    use node::policy::{Policy, Store as StorePolicy};
    use std::path::Path;

    /// The store of a place, as a node of this name and machine sees it.
    fn open(place: &Path, name: &str, machine: &str) -> Store {
        let root = place.join(format!("root-{name}"));
        let random = root.join("proc/sys/kernel/random");
        std::fs::create_dir_all(&random).unwrap();
        std::fs::create_dir_all(root.join("etc")).unwrap();
        std::fs::write(random.join("boot_id"), name).unwrap();
        std::fs::write(root.join("etc/machine-id"), machine).unwrap();
        std::fs::create_dir_all(place.join("store")).unwrap();
        let mut policy = Policy {
            state_dir: place.join(format!("state-{name}")),
            ..Policy::default()
        };
        let store = StorePolicy::file(place.join("store"));
        policy.stores.insert("default".into(), store);
        let node = NodeIdentity::read(&root, name).unwrap();
        Store::open(&policy, "default", node, Path::new("/")).unwrap()
    }

    fn announced(name: &str, uid: &str, machine: &str) -> AnnouncedNode {
        AnnouncedNode {
            name: name.into(),
            uid: uid.into(),
            machine: machine.into(),
        }
    }

    #[test]
    fn nodes_announce_themselves_and_others_read_it() {
        let place = tempfile::tempdir().unwrap();
        let (one, two) = (
            open(place.path(), "n1", "m1"),
            open(place.path(), "n2", "m2"),
        );
        assert_eq!(one.announced_nodes().unwrap(), []);
        assert!(one.announce_node("u1").unwrap() && two.announce_node("u2").unwrap());
        let both = [announced("n1", "u1", "m1"), announced("n2", "u2", "m2")];
        assert_eq!(two.announced_nodes().unwrap(), both);
        // A new UID takes the place of the previous one, and who read that one does not remove it.
        one.announce_node("u3").unwrap();
        two.forget_node(&both[0]).unwrap();
        assert_eq!(two.announced_nodes().unwrap()[0].uid, "u3");
        two.forget_node(&announced("n1", "u3", "m1")).unwrap();
        assert_eq!(two.announced_nodes().unwrap(), both[1..]);
        let checkup = one.fsck(false, std::time::Duration::ZERO).unwrap();
        assert!(checkup.findings.is_empty(), "{:?}", checkup.findings);
    }

    #[test]
    fn a_machine_without_machine_id_announces_nothing() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path(), "n1", "");
        assert!(!store.announce_node("u1").unwrap());
        assert_eq!(store.announced_nodes().unwrap(), []);
    }

    #[test]
    fn what_is_no_announcement_is_passed_over() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path(), "n1", "m1");
        store.announce_node("u1").unwrap();
        let nodes = place.path().join("store/nodes");
        std::fs::write(nodes.join("n2"), "{").unwrap();
        std::fs::write(
            nodes.join("n3"),
            r#"{"version": 1, "uid": "u", "machine": ""}"#,
        )
        .unwrap();
        std::fs::write(
            nodes.join("n4"),
            r#"{"version": 2, "uid": "u", "machine": "m"}"#,
        )
        .unwrap();
        std::fs::write(nodes.join(".n5"), "left by a killed broker").unwrap();
        std::os::unix::fs::symlink("n1", nodes.join("n6")).unwrap();
        assert_eq!(
            store.announced_nodes().unwrap(),
            [announced("n1", "u1", "m1")]
        );
        // A broker that was killed between its two names.
        std::fs::write(nodes.join(".n1"), "").unwrap();
        store.announce_node("u2").unwrap();
        assert_eq!(store.announced_nodes().unwrap()[0].uid, "u2");
    }
}
