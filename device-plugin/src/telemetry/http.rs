//! `/metrics`, `/healthz`, `/readyz` and `/status` over HTTP.
//!
//! All four are made from the report at the moment of the question; nothing is collected
//! beforehand. That one thread answers proves that it is not stuck, which is all `/healthz` says.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::metrics;
use crate::report::Report;

type Reports = watch::Receiver<Arc<Report>>;

/// A server with an address that is its own.
#[derive(Debug)]
pub struct Server(TcpListener);

impl Server {
    /// Takes the address.
    ///
    /// # Errors
    /// It is taken, or not of this host.
    pub async fn bind(address: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("serve metrics on {address}; choose another one with --metrics-addr")
        })?;
        tracing::info!(address = %listener.local_addr().unwrap_or(address), "serving metrics");
        Ok(Self(listener))
    }

    /// Serves until `stop`. Connections are not waited for.
    pub async fn run(self, reports: Reports, stop: CancellationToken) {
        let router = Router::new()
            .route("/metrics", get(metrics_text))
            .route("/healthz", get(|| async { "ok\n" }))
            .route("/readyz", get(ready))
            .route("/status", get(status))
            .with_state(reports);
        tokio::select! {
            () = stop.cancelled() => {}
            served = axum::serve(self.0, router) => {
                if let Err(error) = served {
                    tracing::error!(%error, "metrics are not served any more");
                }
            }
        }
    }
}

async fn metrics_text(State(reports): State<Reports>) -> impl IntoResponse {
    let report = reports.borrow().clone();
    match metrics::render(&report) {
        Ok(text) => ([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn ready(State(reports): State<Reports>) -> impl IntoResponse {
    let report = reports.borrow().clone();
    let unready = report.unready();
    let mut text = if unready.is_empty() {
        "ready\n".to_owned()
    } else {
        "not ready\n".to_owned()
    };
    for reason in unready.iter().chain(&report.notes()) {
        text.push_str(reason);
        text.push('\n');
    }
    let code = if unready.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (code, text)
}

async fn status(State(reports): State<Reports>) -> impl IntoResponse {
    let report = reports.borrow().clone();
    let text = format!("{:#}\n", report.to_json());
    ([(header::CONTENT_TYPE, "application/json")], text)
}
