//! What probes, people and Prometheus are shown of an agent.

use std::sync::Arc;
use std::time::Duration;

use ipam::space::AddressSpace;
use node_server::http::{Page, Pages};
use node_server::metrics::{Sample, counter, gauge, number, text};

use super::{Agent, Worker, lock};
use crate::api::Api;
use crate::node_object::Progress;
use crate::space::SpaceStatus;

/// A call of a store that takes longer hangs.
const HANG: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct AgentPages(pub(super) Arc<Agent>);

impl Pages for AgentPages {
    fn paths(&self) -> &'static [&'static str] {
        &["/healthz", "/readyz", "/metrics"]
    }

    fn page(&self, path: &str, in_full: bool) -> Page {
        match path {
            "/metrics" => Page::metrics(self.0.metrics()),
            "/readyz" => match self.0.faults() {
                faults if faults.is_empty() => match self.0.object_fault() {
                    Some(fault) if in_full => Page::text(200, format!("ready\n{fault}\n")),
                    _ => Page::text(200, "ready\n"),
                },
                // They name files of the node.
                faults if in_full => Page::text(503, format!("not ready\n{}\n", faults.join("\n"))),
                _ => Page::text(503, "not ready\n"),
            },
            _ => Page::text(200, "ok\n"),
        }
    }
}

impl Agent {
    /// Why the node's object is not as it must be. The node is served all the same.
    fn object_fault(&self) -> Option<String> {
        let progress = lock(self.object.as_ref()?);
        let object = progress
            .fault
            .iter()
            .map(|fault| format!("RdmaNode: {fault}"));
        let labels = progress
            .label_fault
            .iter()
            .map(|fault| format!("labels: {fault}"));
        let faults: Vec<String> = object.chain(labels).collect();
        (!faults.is_empty()).then(|| faults.join("\n"))
    }

    /// Why the node may not be served, beginning with what is worst.
    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> = lock(&self.unready).iter().cloned().collect();
        for (name, store) in &self.stores {
            faults.extend(
                lock(&store.fault)
                    .iter()
                    .map(|fault| format!("store {name:?}: {fault}")),
            );
        }
        for (space, worker) in &*lock(&self.workers) {
            faults.extend(hung(worker, HANG));
            let status = lock(&worker.status);
            faults.extend(status.fault.iter().map(|fault| format!("{space}: {fault}")));
            let doubts = status.doubts.iter();
            faults.extend(
                doubts.map(|(subnet, why)| format!("{space}: document of {subnet}: {why}")),
            );
        }
        faults
    }

    pub(super) fn metrics(&self) -> String {
        let workers = lock(&self.workers);
        let of_space = |value: fn(&SpaceStatus) -> u64| -> Vec<Sample> {
            let sample = |(space, worker): (&AddressSpace, &Worker)| {
                let name = space.network_name.clone().unwrap_or_default();
                let labels = vec![("store", space.store.clone()), ("network_name", name)];
                (labels, number(value(&lock(&worker.status))))
            };
            workers.iter().map(sample).collect()
        };
        let api = self.api.as_ref().map(Api::counts);
        let object = self.object.as_ref().map(|object| lock(object).clone());
        let of_object = |value: fn(&Progress) -> u64| -> Vec<Sample> {
            let object = object.iter();
            object
                .map(|object| (Vec::new(), number(value(object))))
                .collect()
        };
        let of_api = |value: fn((u64, u64)) -> u64| -> Vec<Sample> {
            api.map(|counts| (Vec::new(), number(value(counts))))
                .into_iter()
                .collect()
        };
        let questions = lock(&self.questions);
        let questions = questions.iter();
        let questions = questions
            .map(|(result, count)| (vec![("result", (*result).to_owned())], number(*count)));
        let families = vec![
            gauge(
                "parts",
                "Parts of subnets that the node owns",
                of_space(|of| of.parts),
            ),
            gauge(
                "addresses",
                "Addresses of these parts",
                of_space(|of| of.addresses),
            ),
            gauge(
                "documents_in_doubt",
                "Documents of subnets that are not believed, in whole or in part",
                of_space(|of| of.doubts.len() as u64),
            ),
            gauge(
                "store_failing",
                "Whether the last call of the store failed",
                of_space(|of| of.fault.is_some().into()),
            ),
            counter("writes", "Changes of documents", of_space(|of| of.writes)),
            counter(
                "lost_writes",
                "Changes of documents that another node made first",
                of_space(|of| of.lost),
            ),
            counter(
                "api_requests",
                "Requests to the Kubernetes API",
                of_api(|(requests, _)| requests),
            ),
            counter(
                "api_failures",
                "Requests to the Kubernetes API without a good answer, conflicts included",
                of_api(|(_, failed)| failed),
            ),
            gauge(
                "node_object_failing",
                "Whether RdmaNode is not as the daemon says, because a request failed",
                of_object(|object| object.fault.is_some().into()),
            ),
            counter(
                "node_object_writes",
                "Writes of RdmaNode",
                of_object(|object| object.writes),
            ),
            counter(
                "questions",
                "Questions for room, by result",
                questions.collect(),
            ),
        ];
        text("rdma_agent", families)
    }
}

/// That a call of the store goes on for longer than usual.
pub(super) fn hung(worker: &Worker, longer_than: Duration) -> Option<String> {
    let since = lock(&worker.status).calling?.elapsed();
    let (store, cause) = &worker.store;
    (since > longer_than).then(|| {
        format!(
            "{store} has not answered for {} s; {cause}, or the node is overloaded",
            since.as_secs()
        )
    })
}
