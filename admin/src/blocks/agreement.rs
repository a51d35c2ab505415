//! What of the objects and this node's grants does not agree. Decided on what was read at
//! about one time; who asks reads again before it says so.

use std::collections::BTreeMap;

use ipam::block::{AddressSpace, overlap};
use ipam::grants::Grant;

use rdma_ipam_broker::api::document::{BlockObject, NodeId, RangeObject, RangeSpec};
use serde::Serialize;

/// Something that does not agree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(super) struct Finding {
    /// `AddressBlock NAME`, or the block of a grant.
    pub(super) object: String,
    /// What is wrong, and what to do.
    pub(super) what: String,
}

impl Finding {
    fn of(block: &BlockObject, what: String) -> Self {
        let object = format!("AddressBlock {}", block.metadata.name);
        Self { object, what }
    }
}

/// What is wrong with the objects of the cluster.
pub(super) fn of_cluster(blocks: &[BlockObject], ranges: &[RangeObject]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut confirmed: Vec<&RangeSpec> = Vec::new();
    for range in ranges.iter().filter(|range| range.spec.confirmed) {
        let spec = &range.spec;
        let mut others = confirmed.iter().filter(|one| one.space() == spec.space());
        let what = match others.find(|other| spec.disagrees(other)) {
            _ if !range.is_well_named() => {
                "it has not the name of its range, so no broker believes it; kubectl delete it"
                    .into()
            }
            Some(other) => format!(
                "{} and range {} overlap and are cut differently, so no node gets a block of them: end the pods \
                 of one of them, and kubectl delete its AddressBlocks and its AddressRange",
                spec.range, other.range
            ),
            None => {
                confirmed.push(spec);
                continue;
            }
        };
        let object = format!("AddressRange {}", range.metadata.name);
        findings.push(Finding { object, what });
    }
    let mut by_space: BTreeMap<String, Vec<&BlockObject>> = BTreeMap::new();
    for block in blocks {
        if block.is_well_named() {
            let space = by_space.entry(block.space().object_name()).or_default();
            space.push(block);
        } else {
            let what = format!(
                "it has not the name of its block {}, so no broker believes it; kubectl delete it",
                block.spec.block
            );
            findings.push(Finding::of(block, what));
        }
    }
    for mut blocks in by_space.into_values() {
        findings.extend(blocks.iter().filter_map(|block| misfit(block, &confirmed)));
        blocks.sort_by_key(|block| (block.spec.block.network(), block.spec.block.prefix()));
        findings.extend(overlaps(&blocks));
    }
    findings
}

/// That a block is in no range, or is not one of the blocks of its range.
fn misfit(block: &BlockObject, ranges: &[&RangeSpec]) -> Option<Finding> {
    let (network, space) = (block.spec.block, block.space());
    let is_around = |range: &&&RangeSpec| range.space() == space && overlap(range.range, network);
    let around: Vec<&&RangeSpec> = ranges.iter().filter(is_around).collect();
    let what = match around.iter().find(|range| range.contradicts(network)) {
        Some(range) => format!(
            "{network} is not a block of range {}, which is cut into /{}: drain its node, and kubectl delete it",
            range.range, range.block_prefix
        ),
        None if around.iter().any(|range| range.per_node != block.spec.per_node) => {
            "its perNode is not that of its AddressRange, so its node gives no address of it: drain the node, and \
             kubectl delete it"
                .to_owned()
        }
        None if around.is_empty() => {
            "its AddressRange is not there, so nothing fixes the length of blocks; the next broker \
             that needs a block makes it"
                .to_owned()
        }
        None => return None,
    };
    Some(Finding::of(block, what))
}

/// Objects that have an address in common, of one space, sorted by first address and length.
fn overlaps(blocks: &[&BlockObject]) -> Vec<Finding> {
    let mut findings = Vec::new();
    // Those that are around the next one.
    let mut around: Vec<&BlockObject> = Vec::new();
    for block in blocks {
        let network = block.spec.block;
        around.retain(|other| other.spec.block.contains(network.network()));
        if let Some(other) = around.first() {
            let what = format!(
                "{network} of node {:?} overlaps {} of node {:?} (AddressBlock {}): both nodes give the same \
                 addresses; drain one of them, and kubectl delete its object",
                block.spec.node, other.spec.block, other.spec.node, other.metadata.name
            );
            findings.push(Finding::of(block, what));
        }
        around.push(block);
    }
    findings
}

/// What is wrong with the grants of this node. `blocks` are all objects with its label, `grants` those
/// on disk.
pub(super) fn of_node(
    me: &NodeId,
    blocks: &[BlockObject],
    grants: &[(AddressSpace, Grant)],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (space, grant) in grants {
        let name = space.block_name(grant.block);
        let mut own = blocks.iter().filter(|block| block.spec.node == me.name);
        let what = match own.find(|block| block.metadata.name == name) {
            Some(block) if block.metadata.uid != grant.uid => {
                "its AddressBlock was made anew since it was granted; restart this node's broker"
            }
            Some(block) if block.taken().is_some() => {
                "an administrator took it from this node, and this node still gives its addresses; does its \
                 broker run?"
            }
            Some(_) => continue,
            None => {
                "this node gives its addresses, and no AddressBlock says that it has them: another node may give \
                 them, too; does this node's broker run?"
            }
        };
        findings.push(Finding {
            object: format!("{} of {space}", grant.block),
            what: what.to_owned(),
        });
    }
    for block in blocks {
        let of_me = block.node() == *me && block.is_well_named();
        let is_it = |(space, grant): &(AddressSpace, Grant)| {
            *space == block.space() && grant.block == block.spec.block
        };
        let granted = grants.iter().any(is_it);
        if of_me && !granted && block.spec.over.is_none() {
            let what = format!(
                "{} is this node's, and is not granted here: nobody gives its addresses; does this node's \
                 broker run?",
                block.spec.block
            );
            findings.push(Finding::of(block, what));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipnetwork::IpNetwork;
    use jiff::Timestamp;
    use node_wire::PerNode;
    use rdma_ipam_broker::api::document::Over;

    fn me() -> NodeId {
        NodeId {
            name: "n1".into(),
            uid: "u1".into(),
        }
    }

    fn space() -> AddressSpace {
        AddressSpace::new("default", None)
    }

    fn block(network: &str) -> BlockObject {
        let now = Timestamp::UNIX_EPOCH;
        let mut block = BlockObject::new(&space(), network.parse().unwrap(), &me(), 1, now);
        block.metadata.uid = format!("of {network}");
        block
    }

    fn range(network: &str, prefix: u8, fixed: &[&str]) -> RangeObject {
        let fixed: Vec<IpNetwork> = fixed.iter().map(|text| text.parse().unwrap()).collect();
        let mut spec = RangeSpec::new(&space(), network.parse().unwrap(), prefix, &fixed);
        spec.confirmed = true;
        RangeObject::new(spec)
    }

    fn grant(network: &str, uid: &str) -> (AddressSpace, Grant) {
        let grant = Grant {
            block: network.parse().unwrap(),
            uid: uid.into(),
            epoch: 1,
            per_node: None,
            except: Vec::new(),
            boot: String::new(),
        };
        (space(), grant)
    }

    fn over(mut block: BlockObject, administrator: bool) -> BlockObject {
        block.spec.over = Some(Over {
            since: Timestamp::UNIX_EPOCH,
            by: "n2".into(),
            why: "gone".into(),
            administrator,
        });
        block
    }

    fn found(blocks: &[BlockObject]) -> Vec<String> {
        let ranges = [
            range("10.0.0.0/24", 28, &["10.0.0.32/30"]),
            range("fd00::/64", 122, &[]),
        ];
        let findings = of_cluster(blocks, &ranges);
        findings.into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn blocks_beside_each_other_and_static_addresses_are_in_order() {
        let blocks = [
            block("10.0.0.0/28"),
            block("10.0.0.16/28"),
            block("10.0.0.33/32"),
            block("10.0.0.34/32"),
            block("fd00::40/122"),
        ];
        assert_eq!(found(&blocks), Vec::<String>::new());
    }

    #[test]
    fn blocks_that_overlap_are_found_wherever_they_are() {
        let blocks = [
            block("10.0.0.0/28"),
            block("10.0.0.9/32"),
            block("10.0.0.16/28"),
            block("10.0.0.0/27"),
        ];
        let found = found(&blocks);
        let overlaps = found.iter().filter(|what| what.contains("overlaps"));
        assert_eq!(overlaps.count(), 3, "{found:?}");
        let misfits = found.iter().filter(|what| what.contains("cut into /28"));
        assert_eq!(misfits.count(), 2, "{found:?}");
    }

    #[test]
    fn ranges_that_disagree_and_blocks_without_a_range_are_found() {
        let mut renamed = range("10.7.0.0/24", 28, &[]);
        renamed.metadata.name = "x".into();
        let mut unconfirmed = range("10.0.0.0/25", 32, &[]);
        unconfirmed.spec.confirmed = false;
        let ranges = [
            range("10.0.0.0/24", 28, &[]),
            range("10.0.0.0/29", 32, &[]),
            renamed,
            unconfirmed,
        ];
        let findings = of_cluster(&[block("10.9.0.0/28")], &ranges);
        let found: Vec<&str> = findings.iter().map(|finding| &*finding.what).collect();
        assert_eq!(found.len(), 3, "{found:?}");
        for (what, says) in found
            .iter()
            .zip(["cut differently", "believes", "is not there"])
        {
            assert!(what.contains(says), "{what}");
        }
    }

    #[test]
    fn a_block_that_is_divided_otherwise_than_its_range_is_found() {
        let mut of_nodes = range("10.0.0.0/24", 28, &[]);
        of_nodes.spec.per_node = Some(PerNode {
            prefix: 28,
            gateway: None,
        });
        let ranges = [of_nodes.clone()];
        let blocks = [
            block("10.0.0.0/28"),
            block("10.0.0.16/28").divided(of_nodes.spec.per_node),
        ];
        let findings = of_cluster(&blocks, &ranges);
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings[0].what.contains("perNode"), "{findings:?}");
    }

    #[test]
    fn an_object_that_is_not_believed_overlaps_nothing() {
        let mut renamed = block("10.0.0.0/28");
        renamed.metadata.name = "x".into();
        let found = found(&[renamed, block("10.0.0.0/28")]);
        assert!(
            found.len() == 1 && found[0].contains("believes"),
            "{found:?}"
        );
    }

    #[test]
    fn grants_and_objects_of_a_node_are_compared_both_ways() {
        let of = |blocks: &[BlockObject], grants: &[(AddressSpace, Grant)]| -> Vec<String> {
            let findings = of_node(&me(), blocks, grants);
            findings.into_iter().map(|finding| finding.what).collect()
        };
        let one = "10.0.0.0/28";
        assert_eq!(of(&[block(one)], &[grant(one, "of 10.0.0.0/28")]).len(), 0);
        for (blocks, grants, said) in [
            (vec![], vec![grant(one, "x")], "no AddressBlock says"),
            (vec![block(one)], vec![], "not granted"),
            (vec![block(one)], vec![grant(one, "x")], "made anew"),
            (
                vec![over(block(one), true)],
                vec![grant(one, "of 10.0.0.0/28")],
                "took it",
            ),
        ] {
            let found = of(&blocks, &grants);
            assert!(found.len() == 1 && found[0].contains(said), "{found:?}");
        }
        assert_eq!(of(&[over(block(one), true)], &[]).len(), 0);
    }
}
