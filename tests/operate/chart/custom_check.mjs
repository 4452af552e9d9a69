// Validates the custom resources of standard input, a JSON list, with the validators of
// @kubernetes-models in the node modules of the folder that the first argument names.
// Prints a JSON list of errors. The validators accept unknown fields, so fields that a validator
// has not read are errors as well.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

function watched(value, path, unread) {
  if (value === null || typeof value !== "object") return value;
  const copy = Array.isArray(value) ? [] : {};
  for (const key of Object.keys(value)) {
    copy[key] = watched(value[key], `${path}/${key}`, unread);
    if (!Array.isArray(value)) unread.add(`${path}/${key}`);
  }
  return new Proxy(copy, {
    get(target, key) {
      unread.delete(`${path}/${String(key)}`);
      return target[key];
    },
  });
}

const errors = [];
for (const manifest of JSON.parse(readFileSync(0, "utf8"))) {
  const name = `${manifest.kind} ${manifest.metadata.name}`;
  const module = `${manifest.apiVersion}/${manifest.kind}.js`;
  const folder = `${process.argv[2]}/node_modules/@kubernetes-models`;
  const file = `${folder}/${PACKAGES[manifest.apiVersion.split("/")[0]]}/${module}`;
  const { [manifest.kind]: Model } = await import(pathToFileURL(file));
  const unread = new Set();
  try {
    Model.prototype.validate.call(watched(manifest, "", unread));
  } catch (error) {
    errors.push(`${name}: ${error.message}`);
  }
  for (const path of unread) errors.push(`${name}: unknown field ${path}`);
}
console.log(JSON.stringify(errors));
