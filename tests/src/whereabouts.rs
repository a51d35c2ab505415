//! whereabouts' objects on an API server, as whereabouts 0.9 writes them.

#![expect(
    clippy::indexing_slicing,
    reason = "a JSON value answers null for a key that it does not have"
)]

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::api_server::ApiServer;

/// Where they are.
pub const NAMESPACE: &str = "kube-system";

/// An API server that serves both kinds, with the fields that whereabouts' own definitions have.
///
/// # Errors
/// As [`ApiServer::start`].
pub fn api_server() -> Result<ApiServer> {
    let server = ApiServer::start()?;
    serve_both_kinds(&server)?;
    Ok(server)
}

/// Has an API server serve them beside others.
///
/// # Errors
/// The server refuses.
pub fn serve_both_kinds(server: &ApiServer) -> Result<()> {
    let text = json!({"type": "string"});
    let lease = json!({"type": "object", "required": ["id", "podref"],
        "properties": {"id": text, "podref": text, "ifname": text}});
    let pool = json!({"type": "object", "required": ["allocations", "range"], "properties": {
        "range": text, "allocations": {"type": "object", "additionalProperties": lease}}});
    let reservation = json!({"type": "object", "required": ["podref"],
        "properties": {"containerid": text, "podref": text, "ifname": text}});
    for (kind, plural, spec) in [
        ("IPPool", "ippools", pool),
        (
            "OverlappingRangeIPReservation",
            "overlappingrangeipreservations",
            reservation,
        ),
    ] {
        let group = "whereabouts.cni.cncf.io";
        let schema = json!({"type": "object", "properties": {
            "apiVersion": text, "kind": text, "metadata": {"type": "object"}, "spec": spec}});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.{group}")},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"kind": kind, "listKind": format!("{kind}List"), "plural": plural,
                          "singular": kind.to_lowercase()},
                "versions": [{"name": "v1alpha1", "served": true, "storage": true,
                              "schema": {"openAPIV3Schema": schema}}],
            },
        });
        server.apply_crd(&definition.to_string())?;
    }
    Ok(())
}

fn path(plural: &str, name: &str) -> String {
    format!("/apis/whereabouts.cni.cncf.io/v1alpha1/namespaces/{NAMESPACE}/{plural}{name}")
}

/// What a pool's `spec` says; `None` without the pool.
///
/// # Errors
/// The server does not answer.
pub fn pool(server: &ApiServer, name: &str) -> Result<Option<Value>> {
    spec(server, &path("ippools", &format!("/{name}")))
}

/// What a reservation's `spec` says; `None` without the reservation.
///
/// # Errors
/// The server does not answer.
pub fn reservation(server: &ApiServer, name: &str) -> Result<Option<Value>> {
    let name = format!("/{name}");
    spec(server, &path("overlappingrangeipreservations", &name))
}

fn spec(server: &ApiServer, path: &str) -> Result<Option<Value>> {
    let answer = server.client().get(path)?;
    if answer.status == 404 {
        return Ok(None);
    }
    Ok(Some(answer.expect_success()?["spec"].clone()))
}

/// The names of all reservations, sorted.
///
/// # Errors
/// The server does not answer.
pub fn reservations(server: &ApiServer) -> Result<Vec<String>> {
    let list = server
        .client()
        .get(&path("overlappingrangeipreservations", ""))?
        .expect_success()?;
    let items = list["items"].as_array().context("items")?;
    let mut names: Vec<String> = items
        .iter()
        .filter_map(|item| Some(item.pointer("/metadata/name")?.as_str()?.to_owned()))
        .collect();
    names.sort();
    Ok(names)
}

/// Makes a pool as whereabouts does, with these leases.
///
/// # Errors
/// The server refuses.
pub fn make_pool(server: &ApiServer, name: &str, range: &str, allocations: &Value) -> Result<()> {
    let object = json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
        "metadata": {"name": name}, "spec": {"range": range, "allocations": allocations}});
    let made = server.client().post(&path("ippools", ""), &object)?;
    made.expect_success().map(drop)
}

/// Makes a reservation as whereabouts does.
///
/// # Errors
/// The server refuses.
pub fn make_reservation(server: &ApiServer, name: &str, pod: &str, interface: &str) -> Result<()> {
    let object = json!({"apiVersion": "whereabouts.cni.cncf.io/v1alpha1",
        "kind": "OverlappingRangeIPReservation", "metadata": {"name": name},
        "spec": {"podref": pod, "ifname": interface}});
    let path = path("overlappingrangeipreservations", "");
    server
        .client()
        .post(&path, &object)?
        .expect_success()
        .map(drop)
}

/// Removes a reservation, as whereabouts does.
///
/// # Errors
/// The server refuses.
pub fn remove_reservation(server: &ApiServer, name: &str) -> Result<()> {
    let path = path("overlappingrangeipreservations", &format!("/{name}"));
    server.client().delete(&path)?.expect_success().map(drop)
}

/// Removes a lease from a pool, as whereabouts does.
///
/// # Errors
/// The server refuses.
pub fn remove_lease(server: &ApiServer, pool: &str, offset: &str) -> Result<()> {
    let patch = json!({"spec": {"allocations": {offset: null}}});
    let path = path("ippools", &format!("/{pool}"));
    let patched = server
        .client()
        .patch(&path, crate::api_server::Patch::Merge, &patch)?;
    patched.expect_success().map(drop)
}
