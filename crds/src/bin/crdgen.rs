//! Prints the resource definitions as YAML, or writes each into a folder.

use std::{error::Error, path::PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    for definition in latchkey_crds::all() {
        let yaml = latchkey_crds::schema::to_yaml(&definition)?;
        match &folder {
            Some(folder) => {
                let name = definition.metadata.name.as_deref().unwrap_or_default();
                std::fs::write(folder.join(format!("{name}.yaml")), yaml)?;
            }
            None => print!("---\n{yaml}"),
        }
    }
    Ok(())
}
