//! Without arguments, prints the CustomResourceDefinitions as YAML. With two folders and a file as arguments, writes
//! YAML into the first folder, templates of the Helm chart into the second folder, and a reference of all fields into
//! the file.

use std::{error::Error, fs, path::Path};

use latchkey_crds::{
    field_reference::to_markdown,
    schema::{to_chart_template, to_yaml},
};

fn main() -> Result<(), Box<dyn Error>> {
    let definitions = latchkey_crds::definitions();
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.as_slice() {
        [] => {
            for definition in &definitions {
                print!("---\n{}", to_yaml(definition)?);
            }
        }
        [folder, templates, reference] => {
            for definition in &definitions {
                let name = definition.metadata.name.as_deref().unwrap_or_default();
                fs::write(Path::new(folder).join(format!("{name}.yaml")), to_yaml(definition)?)?;
                let template = Path::new(templates).join(format!("crd-{}.yaml", definition.spec.names.plural));
                fs::write(template, to_chart_template(definition)?)?;
            }
            fs::write(reference, to_markdown(&definitions))?;
        }
        _ => return Err("usage: crdgen [YAML-FOLDER CHART-TEMPLATES-FOLDER REFERENCE-FILE]".into()),
    }
    Ok(())
}
