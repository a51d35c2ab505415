//! How well the HCAs of each pod fit its GPUs. Pure.

use std::collections::BTreeMap;

use hca::topology::Class;
use node_wire::status::PodAlignment;

use super::record::{Bindings, ServedGpu};

/// One entry for each pod and resource, in order of their names.
pub fn of_pods(bindings: &Bindings) -> Vec<PodAlignment> {
    let mut pods: BTreeMap<(&str, &str, &str), Vec<&ServedGpu>> = BTreeMap::new();
    for one in bindings.all.values() {
        let pod = (
            one.resource.as_str(),
            one.pod.namespace.as_str(),
            one.pod.name.as_str(),
        );
        pods.entry(pod).or_default().extend(&one.gpus);
    }
    let aligned = pods.into_iter().map(|((resource, namespace, pod), gpus)| {
        let worst = Class::ALL
            .into_iter()
            .rev()
            .map(Class::label)
            .find(|label| gpus.iter().any(|gpu| gpu.class == *label));
        PodAlignment {
            resource: resource.to_owned(),
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            worst: worst.map(str::to_owned),
            score: peer_to_peer_share(&gpus),
        }
    });
    aligned.collect()
}

/// Share of GPUs whose memory their HCA reaches without a copy through host memory, from 0 to 1;
/// `None` without GPUs.
fn peer_to_peer_share(gpus: &[&ServedGpu]) -> Option<f64> {
    let (near, all) = gpus.iter().fold((0.0, 0.0), |(near, all), gpu| {
        (near + f64::from(u8::from(gpu.peer_to_peer)), all + 1.0)
    });
    (all > 0.0).then(|| near / all)
}

#[cfg(test)]
mod tests {
    use node_wire::Pod;

    use super::*;
    use crate::binding::record::Binding;

    #[test]
    fn a_pods_alignment_is_that_of_all_its_gpus() {
        let served = |class: Class| ServedGpu {
            gpu: "0000:8f:00.0".into(),
            class: class.label().into(),
            peer_to_peer: class.is_peer_to_peer(),
            aligned: class.is_peer_to_peer(),
        };
        let mut bindings = Bindings::default();
        for (pod, hca, classes) in [
            ("a", "0000:3b:00.0", vec![Class::Pix]),
            ("a", "0000:3b:00.1", vec![Class::Node, Class::Pxb]),
            ("b", "0000:3b:00.2", vec![]),
        ] {
            let owner = Pod {
                namespace: "ml".into(),
                name: pod.into(),
                uid: None,
            };
            let hca: hca::HcaId = hca.parse().unwrap();
            let binding = Binding {
                resource: "rdma/nic".into(),
                gpus: classes.into_iter().map(served).collect(),
                ..Binding::new(&hca, "slot_3e71787e_0", &owner, None)
            };
            bindings.all.insert(hca, binding);
        }
        let found = of_pods(&bindings);
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.pod.as_str(), one.worst.as_deref(), one.score))
            .collect();
        assert_eq!(
            found,
            [("a", Some("NODE"), Some(2.0 / 3.0)), ("b", None, None)]
        );
    }
}
