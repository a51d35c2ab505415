//! `/metrics`, `/healthz`, `/readyz` and `/status` over HTTP.
//!
//! All four are made from the report at the moment of the question. `/status` and the names of pods
//! are for those who ask on the loopback address, unless the administrator opens them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use node::document::versioned;
use node_server::http::{Page, Pages};
use node_server::metrics::text;
use serde_json::json;
use tokio::sync::watch;

use super::measured::{Holders, Measurements};
use super::metrics;
use crate::report::Report;

type Reports = watch::Receiver<Arc<Report>>;

/// The pages of the daemon, made of its newest report.
#[derive(Debug)]
pub(crate) struct ReportPages {
    pub reports: Reports,
    pub measured: Arc<Measurements>,
    /// When the daemon's loop turned last.
    pub turned: watch::Receiver<Instant>,
}

/// How long the daemon's loop may stand still. It turns every few seconds.
const TURN_TIMEOUT: Duration = Duration::from_secs(30);

impl Pages for ReportPages {
    fn paths(&self) -> &'static [&'static str] {
        &["/metrics", "/healthz", "/readyz", "/status"]
    }

    fn page(&self, path: &str, in_full: bool) -> Page {
        let report = self.reports.borrow().clone();
        match path {
            "/healthz" => match self.turned.borrow().elapsed() {
                still if still > TURN_TIMEOUT => {
                    let seconds = still.as_secs();
                    Page::text(
                        503,
                        format!("the main loop has not turned for {seconds} s\n"),
                    )
                }
                _ => Page::text(200, "ok\n"),
            },
            "/readyz" => ready(&report, in_full),
            "/metrics" => {
                let mut families = metrics::families(&report, in_full);
                let holders = match in_full {
                    true => report.holders(),
                    false => Holders::new(),
                };
                families.extend(self.measured.families(&holders));
                Page::metrics(text("rdma_device_plugin", families))
            }
            _ if in_full => Page {
                status: 200,
                kind: "application/json",
                body: format!("{:#}\n", versioned(json!(report.status(&report.bindings)))),
            },
            _ => Page::text(
                403,
                "the status names pods; ask on the loopback address, or start the daemon with \
                 --open-status\n",
            ),
        }
    }
}

/// The reasons name HCAs and files of the node; an untrusted client learns whether, and not why.
fn ready(report: &Report, in_full: bool) -> Page {
    let unready = report.unready();
    let (status, mut text) = if unready.is_empty() {
        (200, "ready\n".to_owned())
    } else {
        (503, "not ready\n".to_owned())
    };
    if in_full {
        for reason in unready.iter().chain(&report.notes()) {
            text.push_str(reason);
            text.push('\n');
        }
    }
    Page::text(status, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_socket::NodeSocket;
    use crate::reader::Readers;

    fn reports() -> Reports {
        let node_socket = NodeSocket::new("node.sock".into()).0;
        let report = Report {
            excluded: vec!["0000:3b:00.0 is excluded from rdma/a until pod ml/train-0 ends".into()],
            ..Report::new(Default::default(), node_socket, Readers::default())
        };
        watch::Sender::new(Arc::new(report)).subscribe()
    }

    fn ask(path: &str, in_full: bool) -> (u16, String) {
        ask_after(Duration::ZERO, path, in_full)
    }

    /// Asks when the loop has not turned for a while.
    fn ask_after(still: Duration, path: &str, in_full: bool) -> (u16, String) {
        let pages = ReportPages {
            reports: reports(),
            measured: Arc::new(Measurements::new(&Readers::default())),
            turned: watch::Sender::new(Instant::now().checked_sub(still).unwrap()).subscribe(),
        };
        let answer = pages.page(path, in_full);
        (answer.status, answer.body)
    }

    #[test]
    fn healthz_fails_when_the_main_loop_stands_still() {
        let ask = |seconds| ask_after(Duration::from_secs(seconds), "/healthz", false);
        assert_eq!(ask(29).0, 200);
        let (status, body) = ask(31);
        assert_eq!(status, 503);
        assert!(body.contains("has not turned for 31 s"), "{body}");
    }

    #[test]
    fn untrusted_clients_learn_neither_pods_nor_reasons() {
        assert_eq!(ask("/healthz", false), (200, "ok\n".into()));
        assert_eq!(ask("/status", false).0, 403);
        assert_eq!(ask("/status", true).0, 200);
        assert_eq!(ask("/readyz", false), (503, "not ready\n".into()));
        let (_, body) = ask("/readyz", true);
        assert!(
            body.contains("train-0") && body.contains("not been scanned"),
            "{body}"
        );
        assert_eq!(ask("/metrics", false).0, 200);
    }
}
