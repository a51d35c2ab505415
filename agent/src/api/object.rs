//! A document as an object of the Kubernetes API, and back: name, labels, merge patch. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ipam::space::{AddressSpace, hash};
use ipam::subnet::{ADDRESSES, Document, Part, piece, subnet_of};
use ipnetwork::IpNetwork;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::core::PartialObjectMeta;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::backend::Read;

pub(super) const KIND: &str = "AddressSubnet";
const API_VERSION: &str = "rdma-netdev.io/v1alpha1";
/// As long as a document has parts, it is not deleted.
const FINALIZER: &str = "rdma-netdev.io/parts";
/// Label: the hash of the space. Annotation: its store, with `+` and `network_name` if it has one.
const SPACE: &str = "rdma-netdev.io/space";
/// Label: no address is free.
const FULL: &str = "rdma-netdev.io/full";

/// A document that something is to be done about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct News {
    pub space: AddressSpace,
    pub subnet: IpNetwork,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Object {
    api_version: String,
    kind: String,
    metadata: ObjectMeta,
    spec: Document,
    #[serde(default)]
    status: Summary,
}

impl Object {
    /// One that is new.
    pub(super) fn new(
        space: &AddressSpace,
        document: &Document,
        labels: BTreeMap<String, String>,
    ) -> Self {
        Self {
            api_version: API_VERSION.to_owned(),
            kind: KIND.to_owned(),
            metadata: ObjectMeta {
                name: Some(name(space, document.subnet)),
                labels: Some(labels),
                annotations: Some(BTreeMap::from([(SPACE.to_owned(), space.file_name())])),
                finalizers: Some(vec![FINALIZER.to_owned()]),
                ..ObjectMeta::default()
            },
            spec: document.clone(),
            status: Summary::of(document),
        }
    }
}

/// Selects the documents of a space in which a node has parts.
pub(super) fn of_node(space: &AddressSpace, node: &str) -> String {
    format!("{SPACE}={},{}", hash_of(space), label_of(node))
}

/// Selects the documents of a space without a free address.
pub(super) fn of_full(space: &AddressSpace) -> String {
    format!("{SPACE}={},{FULL}=true", hash_of(space))
}

/// For people: columns of a table cannot count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Summary {
    parts: usize,
    nodes: usize,
    free: usize,
}

impl Summary {
    fn of(document: &Document) -> Self {
        let sizes = document.parts.keys().map(|part| piece::size(*part));
        let nodes = document.parts.values().map(|part| part.node.as_str());
        let nodes: BTreeSet<&str> = nodes.filter(|node| !node.is_empty()).collect();
        Self {
            parts: document.parts.len(),
            nodes: nodes.len(),
            free: ADDRESSES.saturating_sub(sizes.sum()),
        }
    }
}

pub(super) fn version_of(text: Option<&str>) -> u64 {
    text.and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn hash_of(space: &AddressSpace) -> String {
    format!("{:016x}", hash(&space.file_name()))
}

/// The label of a node in documents of which it has parts.
pub(super) fn label_of(node: &str) -> String {
    format!("n.rdma-netdev.io/{:016x}", hash(node))
}

/// The name of a document: a DNS subdomain (RFC 1123).
pub(super) fn name(space: &AddressSpace, subnet: IpNetwork) -> String {
    let first = match subnet {
        IpNetwork::V4(subnet) => subnet.network().to_string(),
        IpNetwork::V6(subnet) => {
            let groups = subnet.network().segments();
            groups.map(|group| format!("{group:x}")).join("-")
        }
    };
    format!("{first}-{}", hash_of(space))
}

/// Which document an object is, by its metadata.
pub(super) fn news(object: &PartialObjectMeta) -> Option<News> {
    let metadata = &object.metadata;
    let space = metadata.annotations.as_ref()?.get(SPACE)?;
    let space = AddressSpace::of_file_name(space)?;
    let (first, _) = metadata.name.as_ref()?.rsplit_once('-')?;
    let subnet = match first.contains('.') {
        true => subnet_of(first.parse().ok()?),
        false => subnet_of(first.replace('-', ":").parse().ok()?),
    };
    (metadata.name.as_deref() == Some(&name(&space, subnet))).then_some(News { space, subnet })
}

pub(super) fn parse(
    object: Object,
    space: &AddressSpace,
    subnet: IpNetwork,
) -> Result<Read, String> {
    let (mut document, metadata) = (object.spec, object.metadata);
    let network = space.network_name.as_deref().unwrap_or_default();
    if (
        document.subnet,
        document.store.as_str(),
        document.network_name.as_str(),
    ) != (subnet, space.store.as_str(), network)
    {
        return Err(format!(
            "it is the document of {}, store {:?}, network_name {:?}: its name is another's",
            document.subnet, document.store, document.network_name
        ));
    }
    document.store.clone_from(&space.store);
    let version = version_of(metadata.resource_version.as_deref());
    if version == 0 {
        return Err("its resourceVersion is not a number".to_owned());
    }
    Ok(Read {
        document,
        version,
        labels: metadata.labels.unwrap_or_default(),
    })
}

/// What labels say of a document, that was another one before.
pub(crate) fn labels(
    space: &AddressSpace,
    before: &Document,
    next: &Document,
) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([(SPACE.to_owned(), hash_of(space))]);
    if Summary::of(next).free == 0 {
        labels.insert(FULL.to_owned(), "true".to_owned());
    }
    let asked: BTreeSet<&str> = before
        .parts
        .values()
        .flat_map(|part| &part.wanted)
        .map(|want| want.id.as_str())
        .collect();
    for part in next.parts.values().filter(|part| !part.node.is_empty()) {
        let is_handed = part.id.as_deref().is_some_and(|id| asked.contains(id));
        // An assigned part is not taken up yet.
        let waits =
            !part.wanted.is_empty() || part.over.is_some() || part.id.is_none() || is_handed;
        let label = labels
            .entry(label_of(&part.node))
            .or_insert_with(|| "own".to_owned());
        if waits {
            "asked".clone_into(label);
        }
    }
    labels
}

/// The merge patch (RFC 7386) that makes one document of another.
pub(super) fn patch(
    version: u64,
    before: &Document,
    next: &Document,
    has: &BTreeMap<String, String>,
    labels: &BTreeMap<String, String>,
) -> Value {
    let changed = next
        .parts
        .iter()
        .filter(|(piece, part)| before.parts.get(piece) != Some(part))
        .map(|(piece, part)| (piece.to_string(), whole(part)));
    let removed = before
        .parts
        .keys()
        .filter(|piece| !next.parts.contains_key(piece))
        .map(|piece| (piece.to_string(), Value::Null));
    let parts: serde_json::Map<String, Value> = changed.chain(removed).collect();
    let is_ours = |label: &&String| {
        *label == SPACE || *label == FULL || label.starts_with("n.rdma-netdev.io/")
    };
    let set = labels
        .iter()
        .filter(|(label, value)| has.get(*label) != Some(value))
        .map(|(label, value)| (label.clone(), json!(value)));
    let unset = has
        .keys()
        .filter(is_ours)
        .filter(|label| !labels.contains_key(*label))
        .map(|label| (label.clone(), Value::Null));
    let labels: serde_json::Map<String, Value> = set.chain(unset).collect();
    let finalizers = match next.parts.is_empty() {
        true => Value::Null,
        false => json!([FINALIZER]),
    };
    json!({
        "metadata": {
            "resourceVersion": version.to_string(),
            "labels": labels,
            "finalizers": finalizers,
            // Who wrote which key is not followed: with 250 owners it is more than the document, and the
            // server computes it at each change (Kubernetes, "Server-Side Apply", clearing managedFields).
            "managedFields": [{}],
        },
        "spec": {"parts": parts},
        "status": Summary::of(next),
    })
}

/// A part, in which a key that it does not have takes the place of one that it had.
fn whole(part: &Part) -> Value {
    let mut value = json!(part);
    if let Some(keys) = value.as_object_mut() {
        for key in ["node", "id", "wanted", "over", "network", "reserved"] {
            keys.entry(key).or_insert(Value::Null);
        }
        if let Some(Value::Object(network)) = keys.get_mut("network") {
            network.entry("gateway").or_insert(Value::Null);
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use ipam::subnet::{Over, OwnNetwork, Want};

    fn space() -> AddressSpace {
        AddressSpace::new("default", Some("blue"))
    }

    fn document(parts: &[(&str, Part)]) -> Document {
        let mut document = Document::empty("default", "blue", "10.56.3.0/24".parse().unwrap());
        for (piece, part) in parts {
            document.parts.insert(piece.parse().unwrap(), part.clone());
        }
        document
    }

    fn part(node: &str, id: &str) -> Part {
        Part {
            node: node.into(),
            id: Some(id.into()),
            ..Part::default()
        }
    }

    fn want(node: &str, id: &str) -> Want {
        Want {
            node: node.into(),
            id: id.into(),
            size: 1,
            among: ([10, 56, 3, 1].into(), [10, 56, 3, 9].into()),
        }
    }

    #[test]
    fn a_name_says_which_document_it_is() {
        for (subnet, first) in [
            ("10.56.3.0/24", "10.56.3.0"),
            ("fd00::300/120", "fd00-0-0-0-0-0-0-300"),
            ("::/120", "0-0-0-0-0-0-0-0"),
        ] {
            let subnet: IpNetwork = subnet.parse().unwrap();
            let name = name(&space(), subnet);
            assert_eq!(name, format!("{first}-{}", hash_of(&space())));
            let mut object = PartialObjectMeta {
                types: None,
                metadata: ObjectMeta {
                    name: Some(name),
                    annotations: Some(BTreeMap::from([(SPACE.to_owned(), "default+blue".into())])),
                    ..ObjectMeta::default()
                },
                _phantom: std::marker::PhantomData,
            };
            let space = space();
            assert_eq!(news(&object), Some(News { space, subnet }));
            // One that was copied under another name.
            object.metadata.annotations =
                Some(BTreeMap::from([(SPACE.to_owned(), "default".into())]));
            assert_eq!(news(&object), None);
        }
    }

    #[test]
    fn labels_say_for_whom_something_waits() {
        let before = document(&[(
            "10.56.3.0/28",
            Part {
                wanted: vec![want("c", "c-1"), want("d", "d-1")],
                ..part("a", "a-1")
            },
        )]);
        let over = Some(Over {
            since: "now".into(),
            why: "gone".into(),
        });
        let next = document(&[
            ("10.56.3.0/29", part("a", "a-1")),
            ("10.56.3.8/32", part("c", "c-1")),
            ("10.56.3.64/28", part("b", "b-1")),
            (
                "10.56.3.128/28",
                Part {
                    over,
                    ..part("e", "e-1")
                },
            ),
            (
                "10.56.3.192/28",
                Part {
                    node: "f".into(),
                    network: Some(OwnNetwork::default()),
                    ..Part::default()
                },
            ),
        ]);
        let labels = labels(&space(), &before, &next);
        let of = |node| labels.get(&label_of(node)).map(String::as_str);
        // c was handed a piece, e's part is marked, f's is not taken up yet.
        let found = ["a", "b", "c", "d", "e", "f"].map(of);
        let own = Some("own");
        let asked = Some("asked");
        assert_eq!(found, [own, own, asked, None, asked, asked]);
        assert_eq!(labels[SPACE], hash_of(&space()));
        assert_eq!(labels.get(FULL), None);
        let full = document(&[("10.56.3.0/24", part("a", "a-1"))]);
        let labels = super::labels(&space(), &next, &full);
        assert_eq!(labels[FULL], "true");
    }

    /// RFC 7386.
    fn merge(target: &mut Value, patch: &Value) {
        let Value::Object(changes) = patch else {
            *target = patch.clone();
            return;
        };
        if !target.is_object() {
            *target = json!({});
        }
        let keys = target.as_object_mut().unwrap();
        for (key, change) in changes {
            match change {
                Value::Null => drop(keys.remove(key)),
                change => merge(keys.entry(key).or_insert(Value::Null), change),
            }
        }
    }

    #[test]
    fn a_patch_makes_one_document_of_another() {
        let network = |gateway: Option<std::net::IpAddr>| Part {
            network: Some(OwnNetwork { gateway }),
            ..part("n", "n-1")
        };
        let documents = [
            document(&[]),
            document(&[("10.56.3.0/28", part("a", "a-1"))]),
            document(&[(
                "10.56.3.0/28",
                Part {
                    wanted: vec![want("c", "c-1")],
                    over: Some(Over {
                        since: "now".into(),
                        why: "gone".into(),
                    }),
                    ..part("a", "a-1")
                },
            )]),
            document(&[
                ("10.56.3.0/29", part("b", "b-2")),
                ("10.56.3.8/29", network(Some([10, 56, 3, 9].into()))),
            ]),
            document(&[(
                "10.56.3.8/29",
                Part {
                    reserved: Some("whereabouts: ml/worker-0".into()),
                    ..Part::default()
                },
            )]),
            document(&[("10.56.3.8/29", network(None))]),
        ];
        for before in &documents {
            for next in &documents {
                let has = labels(&space(), &document(&[]), before);
                let labels = labels(&space(), before, next);
                let mut foreign = has.clone();
                foreign.insert("team".into(), "ml".into());
                let mut object = json!({
                    "metadata": {"labels": foreign},
                    "spec": before,
                    "status": Summary::of(before),
                });
                let patch = patch(7, before, next, &foreign, &labels);
                assert_eq!(patch["metadata"]["resourceVersion"], "7");
                merge(&mut object, &patch);
                assert_eq!(Document::deserialize(&object["spec"]).unwrap(), *next);
                let mut expected = labels;
                expected.insert("team".into(), "ml".into());
                assert_eq!(object["metadata"]["labels"], json!(expected));
                assert_eq!(object["status"], json!(Summary::of(next)));
                let is_held = object["metadata"].get("finalizers").is_some();
                assert_eq!(is_held, !next.parts.is_empty());
            }
        }
    }

    #[test]
    fn a_document_under_the_name_of_another_is_refused() {
        let object = |store: &str, version: &str| Object {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            metadata: ObjectMeta {
                resource_version: Some(version.into()),
                ..ObjectMeta::default()
            },
            spec: Document::empty(store, "blue", "10.56.3.0/24".parse().unwrap()),
            status: Summary::default(),
        };
        let subnet = "10.56.3.0/24".parse().unwrap();
        let read = parse(object("default", "12"), &space(), subnet).unwrap();
        assert_eq!(read.version, 12);
        for (object, why) in [
            (object("other", "12"), "store \"other\""),
            (object("default", "x"), "resourceVersion"),
        ] {
            let error = parse(object, &space(), subnet).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
