//! Leases as whereabouts' objects: what is missing there, decided on what was read.

use super::{GROUP, VERSION, offset, pool_name, reservation_name};
use crate::lease::{Lease, Pod};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// What to write so that whereabouts' objects have leases.
#[derive(Debug, Default)]
pub struct Export {
    /// Pools and reservations that are not there.
    pub create: Vec<Value>,
    /// Pools to replace, each with the `resourceVersion` that was read.
    pub replace: Vec<Value>,
    /// How many leases these complete.
    pub missing: usize,
    /// Leases that the objects cannot have, and why.
    pub refused: Vec<String>,
}

/// One pool, and whether it has to be written.
struct PoolToWrite {
    object: Value,
    is_new: bool,
    is_changed: bool,
}

/// Compares leases with the pools and reservations of whereabouts' namespace. Of objects that have all
/// leases nothing is to be written, so this can be repeated. An entry of a pod's earlier container
/// becomes the one of its container now, as at a repeated ADD of whereabouts.
#[must_use]
pub fn export(leases: &[Lease], pools: &[Value], reservations: &[Value]) -> Export {
    let name = |object: &Value| Some(object.pointer("/metadata/name")?.as_str()?.to_owned());
    let mut pools: BTreeMap<String, PoolToWrite> = pools
        .iter()
        .filter_map(|object| {
            let pool = PoolToWrite {
                object: object.clone(),
                is_new: false,
                is_changed: false,
            };
            Some((name(object)?, pool))
        })
        .collect();
    let reserved = reservations
        .iter()
        .filter_map(|object| Some((name(object)?, text(object, "/spec/podref").to_owned())));
    let mut reserved: BTreeMap<String, String> = reserved.collect();
    let mut export = Export::default();
    let mut made = Vec::new();
    for lease in leases {
        match record(lease, &mut pools, &mut reserved, &mut made) {
            Ok(true) => export.missing += 1,
            Ok(false) => {}
            Err(why) => {
                let (address, holder) = (lease.address, &lease.holder);
                export.refused.push(format!("{address} of {holder}: {why}"));
            }
        }
    }
    for pool in pools.into_values().filter(|pool| pool.is_changed) {
        match pool.is_new {
            true => export.create.push(pool.object),
            false => export.replace.push(pool.object),
        }
    }
    export.create.append(&mut made);
    export
}

/// Whether an object has to be written for a lease.
fn record(
    lease: &Lease,
    pools: &mut BTreeMap<String, PoolToWrite>,
    reserved: &mut BTreeMap<String, String>,
    made: &mut Vec<Value>,
) -> Result<bool, String> {
    let holder = &lease.holder;
    let pod = match &holder.pod {
        Some(
            pod @ Pod {
                namespace, name, ..
            },
        ) if !namespace.is_empty() && !name.is_empty() => pod.to_string(),
        _ => return Err("whereabouts' objects name pods, and the lease names none".to_owned()),
    };
    let at = offset(lease.range, lease.address).ok_or_else(|| {
        format!(
            "whereabouts does not read entries so far into {}",
            lease.range
        )
    })?;
    let network_name = lease.network_name.as_deref();
    let reservation = reservation_name(lease.address, network_name);
    match reserved.get(&reservation) {
        Some(other) if *other != pod => {
            return Err(format!(
                "OverlappingRangeIPReservation {reservation} has it for pod {other}: end one of the two pods"
            ));
        }
        _ => {}
    }
    let name = pool_name(lease.range, network_name);
    let pool = pools.entry(name.clone()).or_insert_with(|| PoolToWrite {
        object: object(
            "IPPool",
            &name,
            json!({"range": lease.range, "allocations": {}}),
        ),
        is_new: true,
        is_changed: true,
    });
    let range = text(&pool.object, "/spec/range");
    if range.parse() != Ok(lease.range) {
        return Err(format!(
            "IPPool {name} has the range {range:?}: end its pods and delete it"
        ));
    }
    let entry = json!({"id": holder.container, "podref": pod, "ifname": holder.interface});
    let at = at.to_string();
    let is_written = match allocations(&mut pool.object).map(|entries| entries.entry(at)) {
        Some(serde_json::map::Entry::Vacant(vacant)) => {
            vacant.insert(entry);
            true
        }
        Some(serde_json::map::Entry::Occupied(mut occupied)) => {
            let old = occupied.get();
            let other = text(old, "/podref");
            if other != pod || !["", holder.interface.as_str()].contains(&text(old, "/ifname")) {
                return Err(format!(
                    "IPPool {name} has it for pod {other}: end one of the two pods"
                ));
            }
            occupied.insert(entry.clone()) != entry
        }
        None => {
            return Err(format!(
                "IPPool {name} has no map of allocations: delete it"
            ));
        }
    };
    pool.is_changed |= is_written;
    let is_reserved = !lease.overlapping || reserved.contains_key(&reservation);
    if !is_reserved {
        let spec = json!({"podref": pod, "ifname": holder.interface});
        made.push(object("OverlappingRangeIPReservation", &reservation, spec));
        reserved.insert(reservation, pod);
    }
    Ok(is_written || !is_reserved)
}

fn allocations(pool: &mut Value) -> Option<&mut Map<String, Value>> {
    let spec = pool.get_mut("spec")?.as_object_mut()?;
    spec.entry("allocations")
        .or_insert_with(|| json!({}))
        .as_object_mut()
}

fn object(kind: &str, name: &str, spec: Value) -> Value {
    json!({"apiVersion": format!("{GROUP}/{VERSION}"), "kind": kind, "metadata": {"name": name}, "spec": spec})
}

fn text<'v>(value: &'v Value, pointer: &str) -> &'v str {
    value
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(address: &str, pod: &str) -> Lease {
        serde_json::from_value(json!({
            "address": address, "prefix": 24, "range": "10.0.0.0/24", "store": "default", "part": 0,
            "network": "rail", "pod": {"namespace": "ml", "name": pod}, "container": format!("c-{pod}"),
            "interface": "net1", "node": "n1", "created": "2026-01-01T00:00:00Z",
        }))
        .unwrap()
    }

    fn pool(allocations: Value) -> Value {
        let mut pool = object(
            "IPPool",
            "10.0.0.0-24",
            json!({"range": "10.0.0.0/24", "allocations": allocations}),
        );
        pool["metadata"]["resourceVersion"] = json!("7");
        pool
    }

    fn entry(pod: &str) -> Value {
        json!({"id": format!("c-{pod}"), "podref": format!("ml/{pod}"), "ifname": "net1"})
    }

    #[test]
    fn leases_become_the_objects_that_whereabouts_writes() {
        let mut blue = lease("10.0.0.9", "b");
        blue.network_name = Some("blue".into());
        let plan = export(&[lease("10.0.0.5", "a"), blue], &[], &[]);
        assert_eq!(
            (plan.missing, plan.replace.len(), plan.refused.len()),
            (2, 0, 0)
        );
        let reservation = |name: &str, pod: &str| {
            object(
                "OverlappingRangeIPReservation",
                name,
                json!({"podref": pod, "ifname": "net1"}),
            )
        };
        assert_eq!(
            plan.create,
            [
                json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
                    "metadata": {"name": "10.0.0.0-24"},
                    "spec": {"range": "10.0.0.0/24", "allocations": {"5": entry("a")}}}),
                json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
                    "metadata": {"name": "blue-10.0.0.0-24"},
                    "spec": {"range": "10.0.0.0/24", "allocations": {"9": entry("b")}}}),
                reservation("10.0.0.5", "ml/a"),
                reservation("blue-10.0.0.9", "ml/b"),
            ]
        );
        let (pools, reservations) = plan.create.split_at(2);
        let leases = [lease("10.0.0.5", "a")];
        let again = export(&leases, pools, reservations);
        assert_eq!(
            (again.missing, again.create.len(), again.replace.len()),
            (0, 0, 0)
        );
        // A reservation that was lost is made again.
        let again = export(&leases, pools, &[]);
        assert_eq!(
            (again.missing, again.create, again.replace.len()),
            (1, vec![reservation("10.0.0.5", "ml/a")], 0)
        );
    }

    #[test]
    fn a_pool_that_is_there_is_replaced_as_it_was_read() {
        let mut old = entry("a");
        old["id"] = json!("before");
        let read = pool(json!({"3": entry("other"), "5": old}));
        let leases = [lease("10.0.0.5", "a"), lease("10.0.0.6", "b")];
        let plan = export(&leases, &[read], &[]);
        let written = pool(json!({"3": entry("other"), "5": entry("a"), "6": entry("b")}));
        assert_eq!((plan.replace, plan.create.len()), (vec![written], 2));
    }

    #[test]
    fn an_address_of_another_pod_is_refused_and_nothing_of_it_written() {
        let theirs = object(
            "OverlappingRangeIPReservation",
            "10.0.0.6",
            json!({"podref": "ml/other"}),
        );
        let mut nobody = lease("10.0.0.7", "c");
        nobody.holder.pod = None;
        let leases = [lease("10.0.0.5", "a"), lease("10.0.0.6", "b"), nobody];
        let plan = export(&leases, &[pool(json!({"5": entry("other")}))], &[theirs]);
        assert_eq!(
            (plan.missing, plan.create.len(), plan.replace.len()),
            (0, 0, 0)
        );
        let expected = [
            "IPPool 10.0.0.0-24",
            "OverlappingRangeIPReservation 10.0.0.6",
            "names none",
        ];
        for (refused, why) in plan.refused.iter().zip(expected) {
            assert!(refused.contains(why), "{refused}");
        }
        assert_eq!(plan.refused.len(), 3);
        let mut other = pool(json!({}));
        other["spec"]["range"] = json!("10.0.0.3/24");
        let plan = export(&[lease("10.0.0.5", "a")], &[other], &[]);
        assert!(
            plan.refused[0].contains("10.0.0.3/24"),
            "{:?}",
            plan.refused
        );
    }
}
