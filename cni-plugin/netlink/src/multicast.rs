//! Static multicast addresses of the link layer (`ip maddr add`), which a change of namespaces
//! flushes (`dev_mc_flush()`). Addresses that protocols join come again with them.

use std::{fs, path::Path};

use super::{Error, Result, link::Link};

/// The static multicast addresses of a link of the namespace this process is in, in hexadecimal.
///
/// # Errors
/// The table cannot be read.
pub fn list_static(proc: &Path, link: &Link) -> Result<Vec<String>> {
    let path = proc.join("thread-self/net/dev_mcast");
    match fs::read(&path) {
        Ok(table) => Ok(of_table(&String::from_utf8_lossy(&table), link.index)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::call(format_args!("read {}", path.display()), e)),
    }
}

/// Index, name, users, whether it is static, address (`dev_mc_seq_show()`). A name has no white
/// space in it.
fn of_table(table: &str, index: u32) -> Vec<String> {
    let of_line = |line: &str| {
        let mut fields = line.split_whitespace();
        let of_link = fields.next()?.parse() == Ok(index);
        let is_static = fields.nth(2)?.parse() != Ok(0);
        let address = fields.next()?;
        (of_link && is_static).then(|| address.to_owned())
    };
    table.lines().filter_map(of_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_addresses_of_a_link_are_distinguished_from_those_of_protocols() {
        // Captured on 6.18.
        let table = "2    eth0            1     0     01005e000001\n\
                     3    nic0            1     1     333300000099\n\
                     3    nic0            1     0     333300000001\n";
        assert_eq!(of_table(table, 3), ["333300000099"]);
        assert!(of_table(table, 2).is_empty());
        assert!(of_table("rubbish", 2).is_empty());
    }
}
