//! whereabouts' objects on an API server, as whereabouts 0.9 writes them.

use anyhow::Result;
use serde_json::{Value, json};

use crate::api_server::ApiServer;

/// Where they are.
pub const NAMESPACE: &str = "kube-system";

/// Has an API server serve both kinds, with the fields that whereabouts' own definitions have.
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
