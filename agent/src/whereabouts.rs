//! whereabouts' leases and their pods, as the Kubernetes API has them. They are only read.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam::whereabouts::{GROUP, VERSION, address, address_of_reservation, owner_of_pool};
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kube::core::params::{GetParams, ListParams};
use kube::core::request::Request;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::api::{Api, ApiError};

/// Objects in one answer.
const PAGE: u32 = 500;
/// Multus writes to a pod which addresses it has, when all of them are set.
const NETWORK_STATUS: &str = "k8s.v1.cni.cncf.io/network-status";

#[derive(Debug, Deserialize)]
struct List<S> {
    metadata: ListMeta,
    items: Vec<Object<S>>,
}

#[derive(Debug, Deserialize)]
struct Object<S> {
    metadata: ObjectMeta,
    spec: S,
}

/// Of an `IPPool`.
#[derive(Debug, Deserialize)]
struct Pool {
    range: String,
    /// By the distance to the network address, in decimals.
    #[serde(default)]
    allocations: BTreeMap<String, Holder>,
}

/// Of an allocation, and of an `OverlappingRangeIPReservation`.
#[derive(Debug, Deserialize)]
struct Holder {
    #[serde(default)]
    podref: String,
}

#[derive(Debug, Deserialize)]
struct NetworkStatus {
    #[serde(default)]
    ips: Vec<String>,
}

/// The leases of a network name within a range, and whose pods they are, as `ml/worker-0`.
///
/// # Errors
/// The API does not answer, or does not know whereabouts' objects.
pub async fn leases(
    api: &Api,
    namespace: &str,
    network_name: Option<&str>,
    range: IpNetwork,
) -> Result<BTreeMap<IpAddr, String>, ApiError> {
    // A lease is in its pool; a reservation alone is one that is about to come or to go.
    let mut leases = BTreeMap::new();
    for object in list::<Holder>(api, namespace, "overlappingrangeipreservations").await? {
        let name = object.metadata.name.unwrap_or_default();
        let address = address_of_reservation(&name, network_name);
        leases.extend(address.map(|address| (address, object.spec.podref)));
    }
    let mut is_node = BTreeMap::new();
    for object in list::<Pool>(api, namespace, "ippools").await? {
        let Some((owner, of_pool)) = leases_of(object) else {
            continue;
        };
        let Some(node) = slice(&owner, network_name) else {
            continue;
        };
        if !node.is_empty() && !is_node.contains_key(node) {
            is_node.insert(
                node.to_owned(),
                is_there::<Node>(api, "Node", "/api/v1/nodes", node)
                    .await?
                    .is_some(),
            );
        }
        if is_node.get(node).copied().unwrap_or(true) {
            leases.extend(of_pool);
        }
    }
    leases.retain(|address, _| range.contains(*address));
    Ok(leases)
}

/// Why a pod may still use an address of which it has no lease.
///
/// # Errors
/// The API does not answer.
pub async fn use_of(api: &Api, pod: &str, address: IpAddr) -> Result<Option<String>, ApiError> {
    let names = pod.split_once('/').filter(|(namespace, name)| {
        node::identity::is_name(namespace) && node::identity::is_name(name)
    });
    let Some((namespace, name)) = names else {
        return Ok(Some("it is not known which pod had it".to_owned()));
    };
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    let found = is_there::<Pod>(api, "pod", &path, name).await?;
    Ok(found
        .filter(|found| may_use(found, address))
        .map(|_| format!("pod {pod} is there")))
}

/// Whether a pod may have an address: it does not if it ended, or if it says which ones it has. Another
/// one of the same name may be there.
fn may_use(pod: &Pod, address: IpAddr) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    let annotations = pod.metadata.annotations.as_ref();
    let status = annotations.and_then(|annotations| annotations.get(NETWORK_STATUS));
    let status = status.and_then(|text| serde_json::from_str::<Vec<NetworkStatus>>(text).ok());
    let has = |status: Vec<NetworkStatus>| {
        let mut all = status.into_iter().flat_map(|one| one.ips);
        all.any(|ip| ip.parse::<IpAddr>().map_or(true, |ip| ip == address))
    };
    !matches!(phase, Some("Succeeded" | "Failed")) && status.is_none_or(has)
}

async fn is_there<T: DeserializeOwned>(
    api: &Api,
    kind: &str,
    path: &str,
    name: &str,
) -> Result<Option<T>, ApiError> {
    let request = Request::new(path).get(name, &GetParams::default());
    match api.request(&format!("read {kind} {name}"), request).await {
        Err(ApiError::Refused { code: 404, .. }) => Ok(None),
        found => found.map(Some),
    }
}

/// All objects of a kind, as they are now.
async fn list<S: DeserializeOwned>(
    api: &Api,
    namespace: &str,
    plural: &str,
) -> Result<Vec<Object<S>>, ApiError> {
    let path = format!("/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{plural}");
    let what = format!("list whereabouts' {plural} of namespace {namespace}");
    let mut parameters = ListParams::default().limit(PAGE);
    let mut all = Vec::new();
    loop {
        let page: List<S> = api
            .request(&what, Request::new(&*path).list(&parameters))
            .await?;
        all.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters.continue_token = Some(token),
            None => return Ok(all),
        }
    }
}

/// The leases of a pool, and the name that stands before its range in the pool's name. whereabouts does
/// not find one that is not named after its range.
fn leases_of(pool: Object<Pool>) -> Option<(String, BTreeMap<IpAddr, String>)> {
    let range: IpNetwork = pool.spec.range.parse().ok()?;
    let name = pool.metadata.name?;
    let owner = owner_of_pool(&name, range)?.to_owned();
    let leases = pool.spec.allocations.into_iter();
    let lease = |(offset, holder): (String, Holder)| {
        Some((address(range, offset.parse().ok()?)?, holder.podref))
    };
    Some((owner, leases.filter_map(lease).collect()))
}

/// The name of the node whose slice a pool may be, if it is not the pool of the whole range; `None` of a
/// pool of another network name.
fn slice<'o>(owner: &'o str, network_name: Option<&str>) -> Option<&'o str> {
    match network_name {
        None => Some(owner),
        Some(name) if name == owner => Some(""),
        Some(name) => owner.strip_prefix(name)?.strip_prefix('-'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn leases_are_read_from_the_pool_of_a_range_and_of_a_slice() {
        let pool = |name: &str| {
            let pool = serde_json::from_value(json!({
                "apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
                "metadata": {"name": name},
                "spec": {"range": "10.0.0.0/24", "allocations": {
                    "5": {"id": "c1", "podref": "ml/a"}, "300": {"id": "c2", "podref": "ml/b"},
                    "6": {"id": "c4"}, "x": {"id": "c3", "podref": "ml/c"}}},
            }));
            leases_of(pool.unwrap())
        };
        let lease = |last: u8, pod: &str| ([10, 0, 0, last].into(), pod.to_owned());
        let leases = BTreeMap::from([lease(5, "ml/a"), lease(6, "")]);
        for owner in ["", "blue", "n1", "blue-n1"] {
            let before = if owner.is_empty() { "" } else { "-" };
            let name = format!("{owner}{before}10.0.0.0-24");
            assert_eq!(pool(&name), Some((owner.to_owned(), leases.clone())));
        }
        assert_eq!(pool("10.0.0.0-25"), None);
        for (owner, network_name, node) in [
            ("", None, Some("")),
            ("n1", None, Some("n1")),
            ("", Some("blue"), None),
            ("blue", Some("blue"), Some("")),
            ("blue-n1", Some("blue"), Some("n1")),
            ("bluen1", Some("blue"), None),
            ("red", Some("blue"), None),
        ] {
            assert_eq!(slice(owner, network_name), node, "{owner} {network_name:?}");
        }
    }

    #[test]
    fn a_pod_may_use_an_address_unless_it_ended_or_has_others() {
        let pod = |phase: &str, status: Option<&str>| -> Pod {
            let annotations = status.map(|text| json!({NETWORK_STATUS: text}));
            let pod = json!({"metadata": {"annotations": annotations}, "status": {"phase": phase}});
            serde_json::from_value(pod).unwrap()
        };
        let with = r#"[{"name": "cbr0", "ips": ["10.244.0.7"]}, {"name": "ml/rail1", "ips": ["10.0.0.5"]}]"#;
        let without = r#"[{"name": "cbr0", "ips": ["10.244.0.7"]}, {"name": "x"}]"#;
        for (phase, status, may) in [
            ("Running", None, true),
            ("Running", Some(with), true),
            ("Running", Some(without), false),
            ("Running", Some("not JSON"), true),
            ("Running", Some(r#"[{"ips": ["10.0.0.5/24"]}]"#), true),
            ("Pending", None, true),
            ("Succeeded", Some(with), false),
            ("Failed", None, false),
        ] {
            let found = may_use(&pod(phase, status), [10, 0, 0, 5].into());
            assert_eq!(found, may, "{phase} {status:?}");
        }
    }
}
