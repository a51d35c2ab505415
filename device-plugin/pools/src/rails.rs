//! Rails of NICs by the node's policy.

use std::net::IpAddr;
use std::path::Path;

use hca::topology::Machine;
use hca::topology::rail::{Rail, Source};
use netlink::{Socket, uplink};
use node::policy::{Policy, RailCandidate};

/// Puts NICs on the rails of the policy. If it has rails, a NIC that it does not name is on none.
///
/// # Errors
/// The policy is wrong, or gives a NIC two rails.
pub fn by_policy(machine: &mut Machine, policy: &Path) -> Result<(), String> {
    hca::host::show(policy);
    let rails = Policy::load(policy).map_err(|error| error.with_remedy())?;
    let rails = rails.rails;
    if rails.is_empty() {
        return Ok(());
    }
    let addresses = Socket::open().and_then(|mut socket| uplink::addresses(&mut socket));
    let addresses = addresses.map_err(|error| error.to_string())?;
    for nic in &mut machine.nics {
        let (hca, netdev) = (nic.hca.id.to_string(), nic.hca.netdevs.first());
        let of_nic = addresses
            .iter()
            .filter(|(on, _)| netdev.is_some_and(|netdev| netdev.ifindex == *on));
        let of_nic: Vec<IpAddr> = of_nic.map(|(_, address)| *address).collect();
        let rail = rails.of(&RailCandidate {
            hca: &hca,
            netdev: netdev.map_or("", |netdev| netdev.name.as_str()),
            addresses: &of_nic,
        });
        let rail = rail.map_err(|conflict| {
            let policy = policy.display();
            format!("which rail {hca} is on is not clear: {conflict}; correct rails in {policy}")
        })?;
        nic.rail = rail.map(|number| Rail {
            number,
            source: Source::Policy,
            differs: None,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use hca_trees::{Tree, machine};

    use super::*;

    #[test]
    fn rails_are_those_of_the_nodes_policy() {
        let dir = tempfile::tempdir().unwrap();
        let tree = Tree::new(dir.path());
        machine::a4(&tree);
        let host = tree.host();
        let inventory = hca::inventory(&host).unwrap();
        let read = Machine::read(&host, &inventory, Vec::new()).unwrap();
        let file = dir.path().join("policy.json");
        let of_policy = |policy: &str| {
            std::fs::write(&file, policy).unwrap();
            let mut machine = read.clone();
            by_policy(&mut machine, &file)?;
            let rails = machine
                .nics
                .iter()
                .map(|nic| Some(nic.rail.as_ref()?.number));
            Ok::<Vec<Option<u32>>, String>(rails.collect())
        };
        let by_itself: Vec<Option<u32>> = (0..8).map(Some).collect();
        assert_eq!(of_policy("{}").unwrap(), by_itself);
        let (first, second) = (&read.nics[0], &read.nics[1]);
        let rails = format!(
            r#"{{"rails": {{"{}": 9, "{}": 4}}}}"#,
            first.hca.id, second.hca.netdevs[0].name
        );
        let mut named = vec![None; 8];
        (named[0], named[1]) = (Some(9), Some(4));
        assert_eq!(of_policy(&rails).unwrap(), named);
        let conflict = format!(
            r#"{{"rails": {{"{}": 9, "{}": 4}}}}"#,
            first.hca.id, first.hca.netdevs[0].name
        );
        let conflict = of_policy(&conflict).unwrap_err();
        assert!(
            conflict.contains("on rail 9") && conflict.contains("policy.json"),
            "{conflict}"
        );
    }

    #[test]
    fn a_wrong_policy_is_not_one_without_rails() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("policy.json");
        for wrong in [r#"{"rails": {"ens1": 300}}"#, "{"] {
            std::fs::write(&file, wrong).unwrap();
            let error = by_policy(&mut Machine::default(), &file).unwrap_err();
            assert!(error.contains("policy.json"), "{error}");
        }
    }
}
