// Unpacks the libraries that the page carries, then draws every chart and attention pattern.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return await new Response(stream).text();
}
async function load(name) {
  const script = document.createElement("script");
  script.textContent = await unpack("lib-" + name);
  document.head.appendChild(script);
}
async function draw() {
  for (const name of data.libraries) await load(name);
  for (const [id, figure] of Object.entries(data.charts)) {
    await Plotly.newPlot(id, figure.data, figure.layout, { responsive: true, displaylogo: false, displayModeBar: false });
  }
  for (const [id, props] of Object.entries(data.patterns)) {
    CircuitsVis.render(id, CircuitsVis.AttentionPattern, props);
  }
  document.body.dataset.drawn = "yes";
}
draw().catch((error) => {
  const note = document.createElement("p");
  note.className = "failure";
  note.textContent = "The charts could not be drawn: " + error.message;
  document.body.prepend(note);
});
