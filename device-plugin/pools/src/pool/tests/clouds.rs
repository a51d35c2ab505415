//! The configurations that are shipped for clouds and racks, on trees of their nodes.

use hca_trees::cloud;

use super::*;
use crate::binding::decide::{Container, decide};

const PAGE: &str = include_str!("../../../../../docs/clouds.md");
const GKE: &str = include_str!("../../../../../manifests/chart/values/gke.yaml");
const LATE: &str = include_str!("../../../../../manifests/chart/values/late.yaml");

/// The configuration in a section of the page.
fn shipped(section: &str) -> Config {
    let text = PAGE.split(&format!("\n## {section}\n")).nth(1).unwrap();
    let text = text.split("```yaml\n").nth(1).unwrap();
    config::parse(text.split("```").next().unwrap()).unwrap()
}

/// A node, the pools of a configuration on it, and the HCAs of the first pool by RDMA device.
struct Offer {
    seen: HostSnapshot,
    pools: Pools,
    hcas: Vec<String>,
}

fn offer(lay: impl FnOnce(&Tree), config: &Config) -> Offer {
    let seen = Node::new(lay).scan();
    let pools = pools(config, &seen, &[]);
    let members = pools.snapshots[0].members().iter();
    let mut hcas: Vec<String> = members
        .inspect(|member| assert_eq!(member.health, Health::default(), "{}", member.hca.id))
        .flat_map(|member| member.hca.rdma_names())
        .map(str::to_owned)
        .collect();
    hcas.sort_by_key(|name| (name.len(), name.clone()));
    Offer { seen, pools, hcas }
}

impl Offer {
    /// Rails of the machine's NICs, by RDMA device.
    fn rails(&self) -> Vec<(&str, Option<u32>)> {
        let nics = self.seen.machine.nics.iter();
        nics.map(|nic| {
            let rail = nic.rail.as_ref().map(|rail| rail.number);
            (nic.hca.rdma_devices[0].name.as_str(), rail)
        })
        .collect()
    }

    /// What the slots of a pod with these GPUs become, by RDMA device, and the worst class.
    fn bound(&self, gpus: &[usize], slots: u32) -> (Vec<String>, String) {
        let members = self.pools.snapshots[0].members();
        let usable: Vec<HcaId> = members.iter().map(|member| member.hca.id.clone()).collect();
        let container = Container {
            name: "worker".into(),
            slots: (0..slots)
                .map(|number| format!("slot_3e71787e_{number}"))
                .collect(),
            gpus: gpus.iter().copied().collect(),
            ..Container::default()
        };
        let kept = BTreeMap::new();
        let assigned = decide(&self.seen.machine, &usable, &kept, &[container], true).unwrap();
        let name = |hca: &HcaId| {
            let member = members.iter().find(|member| member.hca.id == *hca).unwrap();
            member.hca.rdma_names()[0].to_owned()
        };
        let names = assigned.iter().map(|one| name(&one.hca)).collect();
        let pairs = assigned.iter().flat_map(|one| &one.pairs);
        let worst = pairs.map(|pair| pair.distance.class).max().unwrap();
        (names, worst.to_string())
    }

    fn excluded(&self) -> Vec<String> {
        self.pools
            .excluded
            .iter()
            .map(ToString::to_string)
            .collect()
    }
}

fn named(prefix: &str, numbers: impl IntoIterator<Item = u32>) -> Vec<String> {
    let numbers = numbers.into_iter();
    numbers.map(|number| format!("{prefix}{number}")).collect()
}

/// A pool that shares whatever there is.
fn everything() -> Config {
    native(&[r#"resource: rdma/all, mode: shared, shares: 1, select: { rdmaDevices: ["*"] }"#])
}

#[test]
fn gke_a3_ultra_and_a4_offer_eight_rails_and_no_gvnic() {
    for text in [GKE, LATE] {
        let values: serde_json::Value = serde_saphyr::from_str(text).unwrap();
        let gke = offer(
            cloud::gke,
            &config::parse(&values["pools"].to_string()).unwrap(),
        );
        assert_eq!(gke.hcas, named("mlx5_", 0..8));
        assert_eq!(gke.excluded(), [""; 0]);
        let units = ids(&gke.pools.snapshots[0]);
        assert!(
            units.iter().all(|unit| unit.starts_with("slot_")),
            "{units:?}"
        );
        let rails: Vec<_> = gke
            .rails()
            .into_iter()
            .filter_map(|(_, rail)| rail)
            .collect();
        assert_eq!(rails, [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(gke.bound(&[2], 1), (named("mlx5_", [2]), "PIX".into()));
        let half = (named("mlx5_", 4..8), "PIX".into());
        assert_eq!(gke.bound(&[4, 5, 6, 7], 4), half);
    }
    let all = offer(cloud::gke, &everything());
    assert_eq!(all.hcas.len(), 8, "{:?}", all.hcas);
}

#[test]
fn azure_nd_offers_infiniband_and_never_the_vf_below_netvsc() {
    let azure = offer(cloud::azure_nd_h100, &shipped("Azure ND"));
    assert_eq!(azure.hcas, named("mlx5_", 0..8));
    let rails = named("mlx5_", 0..8).into_iter().zip((0..8).map(Some));
    let expected: Vec<_> = rails.collect();
    let found: Vec<_> = azure
        .rails()
        .into_iter()
        .map(|(name, rail)| (name.to_owned(), rail))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(azure.bound(&[5], 1), (named("mlx5_", [5]), "NODE".into()));

    // A pool with late binding shares no HCA with another one; the VF is in neither.
    let late = "resource: rdma/late, mode: exclusive, binding: late, select: { functions: [pf] }";
    let shared = "resource: rdma/s, mode: shared, shares: 1, select: { ifNames: [enP*] }";
    let both = offer(cloud::azure_nd_h100, &native(&[late, shared]));
    assert_eq!(both.hcas, named("mlx5_", 0..8));
    assert_eq!(both.pools.snapshots[1].count(), UnitCounts::default());

    let all = offer(cloud::azure_nd_h100, &everything());
    assert_eq!(all.hcas, named("mlx5_", 0..8));
    assert_eq!(
        all.excluded(),
        [
            "0100:00:02.0 is excluded from rdma/all: it carries the traffic of eth0, a netdev of \
          Hyper-V (hv_netvsc)"
        ]
    );
}

#[test]
fn azure_nd_gb300_offers_its_four_vfs() {
    let azure = offer(cloud::azure_nd_gb300, &shipped("Azure ND"));
    assert_eq!(azure.hcas, named("mlx5_", 0..4));
    assert_eq!(azure.excluded(), [""; 0]);
    assert_eq!(azure.bound(&[2], 1), (named("mlx5_", [2]), "NODE".into()));
}

#[test]
fn oci_bm_gpu_offers_a_vf_of_each_port_although_each_has_a_default_route() {
    let oci = offer(cloud::oci, &shipped("OCI BM.GPU"));
    assert_eq!(oci.hcas, named("mlx5_", 16..32));
    assert_eq!(oci.excluded(), [""; 0]);
    let vfs = oci
        .rails()
        .into_iter()
        .filter(|(name, _)| oci.hcas.iter().any(|hca| hca == name));
    let rails: Vec<_> = vfs.filter_map(|(_, rail)| rail).collect();
    assert_eq!(rails, (0..16).collect::<Vec<_>>());
    let (bound, class) = oci.bound(&[3], 2);
    assert_eq!((bound, class.as_str()), (named("mlx5_", [22, 23]), "PIX"));
}

#[test]
fn aws_p5_offers_efa_by_verbs_nodes_alone() {
    let lay = |tree: &Tree| {
        cloud::p5(tree);
        tree.remove("/sys/class/misc/rdma_cm");
    };
    let p5 = offer(lay, &shipped("AWS P5 and P6"));
    assert_eq!(p5.hcas.len(), 32);
    assert_eq!(
        (p5.hcas[0].as_str(), p5.hcas[31].as_str()),
        ("rdmap79s0", "rdmap201s0")
    );
    let (bound, class) = p5.bound(&[1], 4);
    let near: Vec<String> = (96..100).map(|bus| format!("rdmap{bus}s0")).collect();
    assert_eq!((bound, class.as_str()), (near, "PIX"));
    let members = p5.pools.snapshots[0].members();
    let nodes: Vec<_> = members[0]
        .nodes
        .iter()
        .map(|node| node.path.as_str())
        .collect();
    assert_eq!(nodes, ["/dev/infiniband/uverbs0"]);

    // The message names the key.
    let node = Node::new(lay);
    let pools = node.pools(&native(&[
        "resource: rdma/efa, mode: exclusive, select: { drivers: [efa] }",
    ]));
    let Some(reason) = pools.snapshots[0].members()[0].health.worst() else {
        panic!("healthy without rdma_cm");
    };
    let reason = reason.to_string();
    assert!(reason.contains("nodes.required: [uverbs]"), "{reason}");
}

#[test]
fn alibaba_erdma_and_vmware_pvrdma_offer_the_nic_of_another_function() {
    for (lay, section, device, netdev) in [
        (
            cloud::erdma as fn(&Tree),
            "Alibaba eRDMA",
            "erdma_0",
            "eth1",
        ),
        (cloud::pvrdma, "VMware", "vmw_pvrdma0", "ens192"),
    ] {
        let config = shipped(section);
        let found = offer(lay, &config);
        assert_eq!(found.hcas, [device]);
        let hca = &found.pools.snapshots[0].members()[0].hca;
        assert_eq!(hca.netdev_names().collect::<Vec<_>>(), [netdev]);

        // The node's own interface is not for pods.
        let uplink = offer(
            |tree| {
                lay(tree);
                tree.default_route(netdev);
            },
            &config,
        );
        assert!(uplink.hcas.is_empty());
        assert!(
            uplink.excluded()[0].contains(netdev),
            "{:?}",
            uplink.excluded()
        );
    }
}

#[test]
fn hgx_b200_offers_eight_nics_and_never_a_function_of_an_nvswitch() {
    let hgx = offer(cloud::hgx_b200, &shipped("HGX on premises"));
    assert_eq!(hgx.hcas, named("mlx5_", 4..12));
    let switches = hgx.excluded();
    assert_eq!(switches.len(), 4, "{switches:?}");
    assert_eq!(
        switches[0],
        "0000:05:00.0 is excluded from rdma/nic: it is a management function of an NVSwitch"
    );
    let rails = named("mlx5_", 4..12).into_iter().zip((0..8).map(Some));
    let mut expected: Vec<_> = rails.collect();
    expected.insert(4, ("mlx5_bond_0".to_owned(), None));
    let found: Vec<_> = hgx
        .rails()
        .into_iter()
        .map(|(name, rail)| (name.to_owned(), rail))
        .collect();
    assert_eq!(found, expected);
    assert_eq!(hgx.bound(&[0], 1), (named("mlx5_", [4]), "PIX".into()));
    let all = offer(cloud::hgx_b200, &everything());
    assert!(
        all.hcas.contains(&"mlx5_bond_0".to_owned()),
        "{:?}",
        all.hcas
    );
    assert_eq!(all.hcas.len(), 9, "shared pools have none either");
}

#[test]
fn thor_pollara_and_e810_are_chosen_by_their_pci_drivers() {
    let nics = offer(cloud::other_vendors, &shipped("Other NICs"));
    assert_eq!(nics.hcas, ["irdma0", "ionic_0", "bnxt_re0"]);
}

#[test]
fn a_vf_without_a_node_guid_is_offered() {
    let vfs = offer(cloud::vf_without_guid, &shipped("VFs"));
    assert_eq!(vfs.hcas, ["mlx5_1", "mlx5_2"]);
    let members = vfs.pools.snapshots[0].members().iter();
    let guids: Vec<_> = members
        .map(|one| one.hca.rdma_devices[0].node_guid)
        .collect();
    assert!(guids[0].is_some() && guids[1].is_none(), "{guids:?}");
}
