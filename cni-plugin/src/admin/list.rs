//! `rdma-netdev list`: who has what.

use anyhow::Result;
use attachment::{
    listing::{self, Attachment},
    node::{Places, now},
};
use serde_json::json;

use super::{open, records, say, say_json};

pub(super) fn run(places: &Places, as_json: bool) -> Result<()> {
    let node = open(places)?;
    let records = records(&node)?;
    let records = records.iter().map(|(_, record)| record);
    let attachments: Vec<Attachment> = records
        .flat_map(|record| Attachment::all_of(record, &node.roots.proc, &node.boot))
        .collect();
    if as_json {
        say_json(json!({"attachments": attachments}));
    } else {
        say(&listing::text(&attachments, now()));
    }
    Ok(())
}
