//! Which files there should be for other programs of the node and for the next daemon. Pure.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::Path;

use attachment::node::{EXCLUSIVE_HCAS, NODE_ADDRESSES};
use hca::HcaId;

use super::Settings;
use crate::candidate::memory;
use crate::state_files::{File, FilePath};

/// `exclusive` are the HCAs of exclusive pools, `known` is what is known of all HCAs, `good` is the
/// configuration to keep as the last good one, with its place.
pub(super) fn wanted(
    settings: &Settings,
    exclusive: &BTreeSet<HcaId>,
    known: Option<String>,
    good: Option<(&Path, &str)>,
) -> Vec<File> {
    let mut files = vec![File {
        place: FilePath::Node(EXCLUSIVE_HCAS),
        content: lines(exclusive),
        consequence: "the CNI plugin does not know which HCAs are of exclusive pools, and may give a \
                      pod a child of one that another pod will have",
    }];
    files.extend(known.map(|content| File {
        place: FilePath::Node(memory::FILE),
        content,
        consequence: "after a restart of the daemon an HCA in a pod may leave its pool",
    }));
    // Without them the CNI plugin goes by the routes.
    if !settings.node_addresses.is_empty() {
        files.push(File {
            place: FilePath::Node(NODE_ADDRESSES),
            content: lines(&settings.node_addresses),
            consequence: "the CNI plugin does not know which addresses are the node's",
        });
    }
    files.extend(good.map(|(path, text)| File {
        place: FilePath::Own(path.to_owned()),
        content: text.to_owned(),
        consequence: "should the configuration be wrong at the next start, the daemon has none; see \
                      --state-dir",
    }));
    files
}

/// One value a line.
fn lines<T: Display>(values: impl IntoIterator<Item = T>) -> String {
    let lines = values.into_iter().map(|value| format!("{value}\n"));
    lines.collect()
}
